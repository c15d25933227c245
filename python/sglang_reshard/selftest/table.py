"""The verdict for people; a line of JSON says the same to programs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from sglang_reshard.selftest.events import Row
from sglang_reshard.selftest.host import Host

_RIGHT = {True: "[green]right[/]", False: "[bold red]WRONG[/]", None: ""}


def print_result(console: Console, rows: Sequence[Row], told: Sequence[str]) -> None:
    """Prints a table of each run, the advice, and the verdict."""
    for name, of_run in groupby(rows, lambda row: row.run):
        table = Table(title=name)
        for column, justify in (("", "left"), ("route", "left"), ("MB", "right"), ("ms", "right"),
                                ("times the limit", "right"), ("SGLang's own", "right"), ("", "left")):  # fmt: skip
            table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for row in of_run:
            table.add_row(row.step, row.route, _figure(row.nbytes / 1e6), _figure(row.seconds * 1e3),
                          _figure(row.seconds / row.limit if row.limit else 0),
                          f"{_figure(row.stock / row.seconds)} faster" if row.stock and row.seconds else "",
                          " ".join(filter(None, (_RIGHT[row.right], row.why))))  # fmt: skip
        console.print(table)
    for line in told:
        console.print(line, highlight=False, soft_wrap=True)
    wrong = [row for row in rows if row.right is False]
    judged = sum(row.right is not None for row in rows)
    verdict = (
        f"[bold red]{len(wrong)} of {judged} steps are wrong[/]" if wrong else f"[green]all {judged} steps are right[/]"
    )
    console.print(verdict, highlight=False)


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
