"""From what was seen of a case to the rows of the result. Pure functions; bytes and seconds throughout."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmark.cases import STOCK, Case
from benchmark.exactness import bit_exact
from benchmark.timing import Timed, least_bytes
from benchmark.trainer import Seen
from sglang_reshard.observability.report import UpdateReport


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that come from reports. Of stock, which has none: every engine rank maps every tensor whole."""

    bytes_received_ratio: float
    peak_extra_bytes: int
    transport: str | None = None
    transport_reason: str | None = None
    publish_seconds: float | None = None
    move_seconds: float | None = None
    finish_seconds: float | None = None
    control_seconds: float | None = None
    total_seconds: float | None = None


class Row(Told, frozen=True, kw_only=True):
    """One path of one case. benchmark/README.md says what each column means; None is what does not apply."""

    case: str
    path: str
    trainers: int
    engine_tp: int
    updates: int
    tensors: int
    bytes: int
    seconds_median: float
    seconds_p95: float
    limit_seconds: float
    times_limit: float
    times_faster_than_stock: float | None
    gb_per_s_per_rank: float
    trainer_peak_extra_bytes: int
    bit_exact: bool
    first_seconds: float


def rows_of(case: Case, seen: Seen, copies: Sequence[float]) -> list[Row]:
    """In the order in which the paths were run. copies: seconds of copying `least_bytes`, each time."""
    stock = next((statistics.median(timed.seconds) for timed in seen.timed if timed.path == STOCK), None)
    least = max(least_bytes(seen.timed))
    limit_seconds = statistics.median(copies)
    return [_row(case, timed, seen, limit_seconds, stock, least) for timed in seen.timed]


def _row(case: Case, timed: Timed, seen: Seen, limit_seconds: float, stock: float | None, least: int) -> Row:
    median = statistics.median(timed.seconds)
    told = (
        _told(timed.reports)
        if timed.reports
        else Told(bytes_received_ratio=case.model.bytes / least, peak_extra_bytes=timed.trainer_peak_bytes)
    )
    return Row(
        case=case.name,
        path=timed.path,
        trainers=case.trainers,
        engine_tp=case.engine_tp,
        updates=len(timed.seconds),
        tensors=case.model.tensors,
        bytes=case.model.bytes,
        seconds_median=median,
        seconds_p95=percentile(timed.seconds, 95),
        limit_seconds=limit_seconds,
        times_limit=median / limit_seconds,
        times_faster_than_stock=stock / median if stock else None,
        gb_per_s_per_rank=least / median / 1e9,
        bit_exact=bit_exact(timed.before, timed.after, seen.reference),
        first_seconds=timed.first_seconds,
        trainer_peak_extra_bytes=timed.trainer_peak_bytes,
        **msgspec.structs.asdict(told),
    )


def _told(reports: Sequence[UpdateReport]) -> Told:
    ranks = [rank for report in reports for rank in report.engine_ranks]

    def phase(name: str) -> float:
        return statistics.median(report.seconds.get(name, 0.0) for report in reports)

    return Told(
        bytes_received_ratio=max(rank.received_bytes / max(1, rank.least_bytes) for rank in ranks),
        peak_extra_bytes=max(rank.peak_extra_bytes for rank in ranks),
        transport=reports[-1].transport,
        transport_reason=reports[-1].transport_reason,
        publish_seconds=phase("publish"),
        move_seconds=phase("move"),
        finish_seconds=phase("commit"),
        control_seconds=statistics.median(control_seconds(report) for report in reports),
        total_seconds=phase("total"),
    )


def control_seconds(report: UpdateReport) -> float:
    """All of an update but the moving of bytes: notes, the request's way through SGLang, verdicts."""
    return report.seconds["total"] - report.seconds["move"]


def percentile(values: Sequence[float], percent: float) -> float:
    """With straight lines between the values that there are."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)
