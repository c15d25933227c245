"""From what was seen of a case to the rows of the result. Pure functions; bytes and seconds throughout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmark.cases import STOCK, Case
from benchmark.exactness import bit_exact
from benchmark.results import Row, Rows
from benchmark.timing import Timed, least_bytes
from benchmark.trainer import Seen
from sglang_reshard.observability.report import UpdateReport


def rows_of(case: Case, seen: Seen) -> Rows:
    """A row for each path, in the order in which they were run. benchmark/README.md says what each column means."""
    stock = next((statistics.median(timed.seconds) for timed in seen.timed if timed.path == STOCK), None)
    least = max(least_bytes(seen.timed))
    limit_seconds = statistics.median(seen.copies)
    return [_row(case, timed, seen, limit_seconds, stock, least) for timed in seen.timed]


def _row(case: Case, timed: Timed, seen: Seen, limit_seconds: float, stock: float | None, least: int) -> Row:
    median = statistics.median(timed.seconds)
    whole = {"bytes_received_ratio": case.model.bytes / least, "peak_extra_bytes": timed.trainer_peak_bytes}
    return {
        # Stock reports nothing: every engine rank maps every tensor whole.
        **(_of_reports(timed.reports) if timed.reports else {**dict.fromkeys(_REPORTED), **whole}),
        "case": case.name,
        "path": timed.path,
        "trainers": case.trainers,
        "engine_tp": case.engine_tp,
        "updates": len(timed.seconds),
        "tensors": case.model.tensors,
        "bytes": case.model.bytes,
        "seconds_median": median,
        "seconds_p95": float(np.percentile(timed.seconds, 95)),
        "limit_seconds": limit_seconds,
        "times_limit": median / limit_seconds,
        "times_faster_than_stock": stock / median if stock else None,
        "gb_per_s_per_rank": least / median / 1e9,
        "trainer_peak_extra_bytes": timed.trainer_peak_bytes,
        "bit_exact": bit_exact(timed.before, timed.after, seen.reference),
        "first_seconds": timed.first_seconds,
    }


_PHASES = ("publish", "move", "commit", "control", "total")
_REPORTED = (
    "bytes_received_ratio", "peak_extra_bytes", "transport", "transport_reason", "publish_seconds", "move_seconds",
    "finish_seconds", "control_seconds", "total_seconds",
)  # fmt: skip


def _of_reports(reports: Sequence[UpdateReport]) -> Row:
    """The columns that come from reports. control: all of an update but the moving of bytes."""
    ranks = [rank for report in reports for rank in report.engine_ranks]
    seconds = [{**r.seconds, "control": r.seconds["total"] - r.seconds["move"]} for r in reports]
    medians = (statistics.median(of.get(phase, 0.0) for of in seconds) for phase in _PHASES)
    received = max(rank.received_bytes / max(1, rank.least_bytes) for rank in ranks)
    peak = max(rank.peak_extra_bytes for rank in ranks)
    figures = received, peak, reports[-1].transport, reports[-1].transport_reason, *medians
    return dict(zip(_REPORTED, figures, strict=True))
