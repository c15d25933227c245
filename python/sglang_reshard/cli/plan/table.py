"""Prints a forecast as tables, and draws it. Bytes are decimal (1 GB is 10^9), as link speeds are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sglang_reshard.cli.plan.figures import Forecast
from sglang_reshard.observability.report import titled_table

_COUNT = "{:,}".format
_GB = 1e9
_SPREAD = "min", "median", "max"  # over ranks


def print_forecast(console: Console, forecast: Forecast) -> None:
    for line in _head(forecast):
        console.print(line, highlight=False, soft_wrap=True)
    for reason in forecast.refused:
        console.print(f"[bold red]refused[/] {escape(reason)}", highlight=False, soft_wrap=True)
    if forecast.refused:
        return
    console.print(_bytes(forecast))
    console.print(needs(forecast))
    ways = titled_table("transports by name", "transport", "predicted seconds")
    ways.add_column("would be refused", overflow="fold")
    for way in forecast.ways:
        ways.add_row(way.name, "" if way.seconds is None else f"{way.seconds:.3g}", escape(way.refused))
    console.print(ways)
    if forecast.remark:
        console.print(f"[yellow]note[/] {escape(forecast.remark)}", highlight=False, soft_wrap=True)
    spent = ", ".join(f"{step} {seconds:.1f}" for step, seconds in forecast.seconds_by_step.items())
    console.print(f"seconds spent on this forecast: {spent}", highlight=False, soft_wrap=True)


def _head(forecast: Forecast) -> list[str]:
    asked = forecast.question
    of_layers = f", {asked.layers} layers" if asked.layers else ""
    hosts = "colocated" if asked.colocated else "on separate hosts"
    lines = [
        f"[bold]{escape(asked.model)}[/]{of_layers}: {forecast.tensors:,} tensors, {decimal(forecast.model_bytes)}",
        f"{asked.source} ({asked.source.ranks} trainer ranks) -> {asked.target} "
        f"({asked.target.ranks} engine ranks, {hosts}, {asked.ranks_per_host} ranks per host)",
    ]
    if not forecast.refused:
        lines.append(f"transport [bold]{forecast.transport}[/]: {escape(forecast.transport_reason)}")
        lines.append(
            f"predicted transfer time [bold]{forecast.predicted_seconds:.3g} s[/], {forecast.messages:,} messages"
        )
        if forecast.communicators:
            of = Counter((c.trainer_ranks, c.engine_ranks) for c in forecast.communicators)
            counted = ", ".join(f"{n} x {t} trainer ranks and {e} engine ranks" for (t, e), n in of.items())
            lines.append(f"NCCL communicators: {counted}")
    return lines


def _bytes(forecast: Forecast) -> Table:
    gather = forecast.gather
    assert gather is not None
    extra = gather.extra_bytes
    table = titled_table("per rank", "", *_SPREAD, "by gather")
    for title, side, figure, gathered in (
        ("engine rank receives", "engine_ranks", "received_bytes", gather.engine_received_bytes),
        ("  least possible", "engine_ranks", "least_bytes", None),
        ("  extra memory at the peak", "engine_ranks", "extra_bytes", extra),
        ("trainer rank holds", "trainer_ranks", "shard_bytes", None),
        ("  sends, or is read from", "trainer_ranks", "sent_bytes", None),
        ("  receives", "", "", gather.trainer_received_bytes),
        ("  extra memory at the peak", "trainer_ranks", "extra_bytes", extra),
    ):
        ranks = getattr(forecast, side) if side else ()
        _add_spread(table, title, ranks, figure, decimal, "" if gathered is None else decimal(gathered))
    for title, ranks in (("to an engine rank", forecast.engine_ranks), ("of a trainer rank", forecast.trainer_ranks)):
        _add_spread(table, f"messages {title}", ranks, "messages", _COUNT, "")
    return table


def needs(forecast: Forecast) -> Table:
    """Returns the table of needs that apply to where weights are: on a CPU, on GPUs, or offloaded from these."""
    assert forecast.sizing is not None
    table = titled_table("what else a rank needs", "", *_SPREAD)
    for title, side, figure, shown in (_CPU_ROWS if forecast.question.device == "cpu" else _GPU_ROWS) + _KEPT_ROWS:
        _add_spread(table, title, getattr(forecast.sizing, side), figure, shown)
    return table


_Row = tuple[str, str, str, Callable[[int], str]]
_KEPT_ROWS: tuple[_Row, ...] = (
    ("trainer rank, update_async: copy", "trainer_ranks", "async_bytes", decimal),
    ("trainer rank, delta='auto': base and changes", "trainer_ranks", "delta_bytes", decimal),
    ("engine rank, delta='auto': buckets", "engine_ranks", "delta_bytes", decimal),
    ("engine rank, staged=True: shadow weights", "engine_ranks", "staged_bytes", decimal),
)
_CPU_ROWS: tuple[_Row, ...] = (
    ("trainer rank, /dev/shm", "trainer_ranks", "shm_bytes", decimal),
    ("trainer rank, open files", "trainer_ranks", "storages", _COUNT),
    ("engine rank, mappings", "engine_ranks", "mappings", _COUNT),
)
_GPU_ROWS: tuple[_Row, ...] = (
    ("trainer rank, CUDA IPC handles", "trainer_ranks", "allocations", _COUNT),
    ("trainer rank, /dev/shm if offloaded", "trainer_ranks", "arena_bytes", decimal),
)


def _add_spread(
    table: Table, title: str, ranks: Sequence[Any], figure: str, shown: Callable[[int], str], *others: str
) -> None:
    values = [getattr(rank, figure) for rank in ranks] or [0]
    table.add_row(title, *map(shown, (min(values), int(median(values)), max(values))), *others)


def draw(forecast: Forecast, path: Path) -> None:
    """Draws bytes from every trainer rank to every engine rank, and those of every rank.

    The file name's extension gives the picture's format.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    asked = forecast.question
    figure.suptitle(f"{asked.model}: {asked.source} -> {asked.target}, {forecast.transport}")
    panels = figure.subplot_mosaic([["map", "map"], ["engines", "trainers"]], height_ratios=(1.2, 1))
    links = np.array(forecast.link_bytes).T / _GB
    image = panels["map"].imshow(links, aspect="auto", origin="lower", cmap="viridis")
    panels["map"].set(xlabel="trainer rank", ylabel="engine rank")
    figure.colorbar(image, ax=panels["map"], label="GB")
    received, sent = [r.received_bytes for r in forecast.engine_ranks], [r.sent_bytes for r in forecast.trainer_ranks]
    for side, title, nbytes, label in (
        ("engines", "engine rank", received, "received"),
        ("trainers", "trainer rank", sent, "sent, or read"),
    ):
        panels[side].bar(range(len(nbytes)), [n / _GB for n in nbytes], label=label)
        panels[side].set(xlabel=title, ylabel="GB")
    panels["engines"].plot([r.least_bytes / _GB for r in forecast.engine_ranks], "k_", label="least possible")
    for side in ("engines", "trainers"):
        panels[side].set_ylim(bottom=0)
        panels[side].legend()
    figure.savefig(path, dpi=120)
