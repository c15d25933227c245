"""Prints a forecast as tables. Bytes are decimal (1 GB is 10^9), as link speeds are."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sglang_reshard.cli.plan.figures import Forecast, Spread
from sglang_reshard.cli.plan.sizing_table import needs


def print_forecast(console: Console, forecast: Forecast) -> None:
    for line in _head(forecast):
        console.print(line, highlight=False, soft_wrap=True)
    for reason in forecast.refused:
        console.print(f"[bold red]refused[/] {escape(reason)}", highlight=False, soft_wrap=True)
    if forecast.refused:
        return
    console.print(_bytes(forecast))
    console.print(needs(forecast))
    console.print(_ways(forecast))
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
        f"{asked.source} ({asked.source.trainer_ranks} trainer ranks) -> {asked.target} "
        f"({asked.target.engine_ranks} engine ranks, {hosts}, {asked.ranks_per_host} ranks per host)",
    ]
    if not forecast.refused:
        lines.append(f"transport [bold]{forecast.transport}[/]: {escape(forecast.transport_reason)}")
        lines.append(
            f"predicted transfer time [bold]{forecast.predicted_seconds:.3g} s[/], {forecast.messages:,} messages"
        )
        if forecast.communicators:
            lines.append(f"NCCL communicators: {_communicators(forecast)}")
    return lines


def _communicators(forecast: Forecast) -> str:
    of = Counter((c.trainer_ranks, c.engine_ranks) for c in forecast.communicators)
    return ", ".join(f"{n} x {t} trainer ranks and {e} engine ranks" for (t, e), n in of.items())


def _bytes(forecast: Forecast) -> Table:
    table = Table(title="per rank")
    table.add_column("")
    for column in ("min", "median", "max", "by gather"):
        table.add_column(column, justify="right")
    gather = forecast.gather
    assert gather is not None
    extra = gather.extra_bytes
    for title, side, figure, gathered in (
        ("engine rank receives", "engine_ranks", "received_bytes", gather.engine_received_bytes),
        ("  least possible", "engine_ranks", "least_bytes", None),
        ("  extra memory at the peak", "engine_ranks", "extra_bytes", extra),
        ("trainer rank holds", "trainer_ranks", "shard_bytes", None),
        ("  sends, or is read from", "trainer_ranks", "sent_bytes", None),
        ("  receives", "", "", gather.trainer_received_bytes),
        ("  extra memory at the peak", "trainer_ranks", "extra_bytes", extra),
    ):
        spread = forecast.spread(side, figure) if side else Spread(0, 0, 0)
        cells = map(decimal, (spread.min, spread.median, spread.max))
        table.add_row(title, *cells, "" if gathered is None else decimal(gathered))
    for title, side in (("to an engine rank", "engine_ranks"), ("of a trainer rank", "trainer_ranks")):
        spread = forecast.spread(side, "messages")
        table.add_row(f"messages {title}", *(f"{n:,}" for n in (spread.min, spread.median, spread.max)), "")
    return table


def _ways(forecast: Forecast) -> Table:
    table = Table(title="transports by name")
    table.add_column("transport")
    table.add_column("predicted seconds", justify="right")
    table.add_column("would be refused", overflow="fold")
    for way in forecast.ways:
        table.add_row(way.name, "" if way.seconds is None else f"{way.seconds:.3g}", escape(way.refused))
    return table
