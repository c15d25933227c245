"""The result as tables for people; `verdict.summary` is the same for programs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmark.demo.events import Updated
from benchmark.demo.settings import Settings
from benchmark.demo.verdict import SLACK_BYTES, UpdateVerdict, Verdict

MIB = 1024 * 1024

_CLAIMS = {
    "updated": "every update reached every engine rank",
    "tokens_equal": "float32: after each update the engine says what transformers says with the trainer's weights",
    "told_apart": "before each update it said something else: nothing on dummy weights, or the step before",
    "unmoved": "the trainer's step alone changes nothing in the engine",
    "bit_exact": "every tensor on every engine rank is bit for bit what a stock load of the checkpoint puts there",
    "rank_0_own_shard": "engine rank 0 received no more than trainer rank 0 holds: nothing was gathered",
    "memory_bounded": "peak extra memory on every engine rank stays within two buckets and {slack} MiB",
}


def print_result(console: Console, settings: Settings, updates: list[Updated], verdict: Verdict) -> None:
    console.print(_updates_table(settings, updates, verdict))
    console.print(_ranks_table(updates))
    for line in _claims(verdict):
        console.print(line, highlight=False, soft_wrap=True)


def _updates_table(settings: Settings, updates: list[Updated], verdict: Verdict) -> Table:
    table = Table(title=f"trainer TP={settings.source_tp} -> engine TP={settings.target_tp}, on {settings.device}")
    for column in ("update", "engine", "transport", "seconds by phase", "tokens equal", "before", "bit-exact"):
        table.add_column(column, overflow="fold")
    for update, judged in zip(updates, verdict.updates, strict=True):
        table.add_row(
            update.report.weight_version or "",
            update.dtype,
            update.report.transport,
            _phases(update.report.seconds),
            "yes" if judged.tokens_equal else "no",
            "no" if judged.told_apart else "yes",
            _exactness(judged),
        )
    return table


def _phases(seconds: dict[str, float]) -> str:
    total_last = sorted(seconds.items(), key=lambda item: item[0] == "total")
    return ", ".join(f"{phase} {s:.3f}" for phase, s in total_last)


def _exactness(judged: UpdateVerdict) -> str:
    if judged.differing:
        return f"{len(judged.differing)} of {judged.tensors} differ: {', '.join(judged.differing[:3])}"
    return f"yes, {judged.tensors} tensors" if judged.tensors else "nothing compared"


def _ranks_table(updates: list[Updated]) -> Table:
    """Bytes of the last update of each precision; the others of that precision move the same."""
    last = {update.dtype: update for update in updates}
    table = Table(title="MiB per engine rank, last update of each precision")
    table.add_column("engine rank", justify="right")
    for dtype in last:
        for column in ("received", "least possible", "peak extra"):
            table.add_column(f"{dtype}\n{column}", justify="right")
    for row in zip(*(update.report.engine_ranks for update in last.values()), strict=True):
        cells = [str(row[0].rank)]
        for rank in row:
            cells += [f"{n / MIB:.2f}" for n in (rank.received_bytes, rank.least_bytes, rank.peak_extra_bytes)]
        table.add_row(*cells)
    return table


def _claims(verdict: Verdict) -> list[str]:
    return [
        f"[green]yes[/] {text.format(slack=SLACK_BYTES // MIB)}"
        if verdict.claims[name]
        else f"[bold red]NO [/] {text.format(slack=SLACK_BYTES // MIB)}"
        for name, text in _CLAIMS.items()
        if name in verdict.claims
    ]
