"""`UpdateReport` for people: one table with a part each for the update, its phases and the ranks of both sides."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from sglang_reshard.observability.report import UpdateReport

FEW = 8  # ranks of one side that are shown one by one
_WIDTH = 100
_OUTER = ("publish", "total")  # as trainer rank 0 saw them
_COLUMNS: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("received", lambda rank: rank.received_bytes),
    ("least possible", lambda rank: rank.least_bytes),
    ("peak extra", lambda rank: rank.peak_extra_bytes),
)
_TRAINER_COLUMNS: tuple[tuple[str, Callable[[Any], int]], ...] = (
    ("holds", lambda rank: rank.shard_bytes),
    ("sent", lambda rank: rank.sent_bytes),
)


def table_of(report: UpdateReport) -> Table:
    whole = Table.grid()
    for part in (_head(report), _phases(report), _ranks("engine", report.engine_ranks, _COLUMNS)):
        whole.add_row(part)
    whole.add_row(_ranks("trainer", report.trainer_ranks, _TRAINER_COLUMNS))
    return whole


def text_of(report: UpdateReport) -> str:
    """Without colours, at most 100 characters wide."""
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, force_terminal=False).print(table_of(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def size(nbytes: float) -> str:
    """In the unit that leaves one to three digits before the point; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def _head(report: UpdateReport) -> Table:
    head = Table.grid(padding=(0, 2))
    rows = [
        ("version", report.weight_version if report.weight_version is not None else "(unchanged)"),
        ("transport", f"{report.transport}: {report.transport_reason}"),
        ("verified", f"{report.verified}, digest {report.digest}" if report.digest else report.verified),
        ("received", f"{size(report.received_bytes)} by {len(report.engine_ranks)} engine ranks together"),
        ("rate", f"{size(report.bytes_per_second)}/s during the slowest rank's move"),
        ("bucket", size(report.bucket_bytes)),
    ]
    if report.message:
        rows.append(("note", report.message))
    for name, said in rows:
        head.add_row(name, Group(_plain(said)))
    return head


def _plain(said: str) -> Any:
    from rich.text import Text  # names of tensors have brackets, which are markup to rich elsewhere

    return Text(said)


def _phases(report: UpdateReport) -> Table:
    """Seconds of each phase on engine ranks; `publish` and `total` are trainer rank 0's."""
    table = Table(title="seconds", title_justify="left")
    table.add_column("phase")
    for column in ("least", "median", "most", "engine rank with the most"):
        table.add_column(column, justify="right")
    inner = [phase for phase in report.seconds if phase not in _OUTER]
    for phase in [*(p for p in report.seconds if p == "publish"), *inner, *(p for p in report.seconds if p == "total")]:
        by_rank = [(rank.seconds[phase], rank.rank) for rank in report.engine_ranks if phase in rank.seconds]
        if phase in _OUTER or not by_rank:
            table.add_row(phase, "", "", f"{report.seconds[phase]:.4f}", "trainer rank 0")
            continue
        seconds = [s for s, _ in by_rank]
        slowest = str(max(by_rank)[1])
        table.add_row(phase, *(f"{s:.4f}" for s in (min(seconds), median(seconds), max(seconds))), slowest)
    return table


def _ranks(side: str, ranks: Sequence[Any], columns: tuple[tuple[str, Callable[[Any], int]], ...]) -> Table:
    table = Table(title=f"bytes of {len(ranks)} {side} ranks", title_justify="left")
    table.add_column(f"{side} rank")
    for name, _ in columns:
        table.add_column(name, justify="right")
    if len(ranks) <= FEW:
        for rank in ranks:
            table.add_row(str(rank.rank), *(size(value(rank)) for _, value in columns))
        return table
    for name, pick in (("least", min), ("median", median), ("most", max)):
        table.add_row(name, *(size(pick([value(rank) for rank in ranks])) for _, value in columns))
    return table
