"""The verdict for people; a line of JSON says the same to programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from sglang_reshard.selftest.events import Row
from sglang_reshard.selftest.host import Host, facts

_RIGHT = {True: "[green]right[/]", False: "[bold red]WRONG[/]", None: ""}


def conclude(host: Host, rows: Sequence[Row], seconds: float) -> int:
    """Prints the table and the line of JSON. Returns the exit status: 0 if every step was right."""
    # A table is cut at the width of a terminal that is not there: give it room in a log.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    print_result(console, rows, advice(host, rows))
    right = all_right(rows)
    said = {"ok": right, "host": facts(), "seconds": round(seconds, 1), "rows": [_plain(row) for row in rows]}
    print(json.dumps(said), flush=True)
    return 0 if right else 1


def all_right(rows: Sequence[Row]) -> bool:
    """Returns whether steps were judged, and all of them were right."""
    judged = [row.right for row in rows if row.right is not None]
    return bool(judged) and all(judged)


def print_result(console: Console, rows: Sequence[Row], told: Sequence[str]) -> None:
    """Prints a table of each run, the advice, and the verdict."""
    for name, of_run in groupby(rows, lambda row: row.run):
        table = Table(title=name)
        for column, justify in (("", "left"), ("route", "left"), ("MB", "right"), ("ms", "right"),
                                ("times the limit", "right"), ("than stock", "right"), ("", "left")):  # fmt: skip
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in of_run:
            table.add_row(row.step, row.route, _figure(row.nbytes / 1e6), _figure(row.seconds * 1e3),
                          _figure(row.seconds / row.limit if row.limit else 0),
                          _faster(row.stock / row.seconds) if row.stock and row.seconds else "",
                          " ".join(filter(None, (_RIGHT[row.right], row.why))))  # fmt: skip
        console.print(table)
    for line in told:
        console.print(line, highlight=False, soft_wrap=True)
    wrong = [row for row in rows if row.right is False]
    judged = sum(row.right is not None for row in rows)
    if wrong:
        verdict = f"[bold red]{len(wrong)} of {judged} steps are wrong[/]"
    else:
        verdict = f"[green]all {judged} steps are right[/]" if judged else "[bold red]no step was judged[/]"
    console.print(verdict, highlight=False)


def _faster(times: float) -> str:
    return f"{_figure(times)} faster" if times >= 1 else f"{_figure(1 / times)} slower"


def advice(host: Host, rows: Sequence[Row]) -> list[str]:
    """Returns what to set on this host, and why."""
    warm = [row for row in rows if row.step.startswith("warm update") and row.right]
    if not warm:
        return []
    best = min(warm, key=lambda row: row.seconds)
    chosen = next((row for row in warm if row.step == "warm update, auto" and row.run == best.run), best)
    told = [
        f'transport="auto" takes {chosen.route} here: {chosen.seconds * 1e3:.1f} ms for {chosen.nbytes / 1e6:,.0f} MB'
    ]
    if best.route != chosen.route and best.seconds < 0.9 * chosen.seconds:
        told.append(f'transport="{best.route}" was faster: {best.seconds * 1e3:.1f} ms; try it with your own model')
    if not host.gpus:
        told.append("This host has no GPU: the figures say what is right, not how fast a GPU would be.")
    return told


def _figure(value: float) -> str:
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _plain(row: Row) -> dict[str, object]:
    """Six significant digits say more than two runs have in common."""
    found = {name: getattr(row, name) for name in row.__struct_fields__}
    rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in found.items()}
    return {k: v for k, v in rounded.items() if k == "right" or v not in ("", 0, {})}
