"""Prints what a plan's ranks need in addition to buffers, as one table."""

from __future__ import annotations

from collections.abc import Callable

from rich.filesize import decimal
from rich.table import Table

from sglang_reshard.cli.plan.figures import Forecast, Spread

_BYTES = decimal
_COUNT = "{:,}".format


def needs(forecast: Forecast) -> Table:
    """Returns the table of needs that apply to where weights are: on a CPU, on GPUs, or offloaded from these."""
    table = Table(title="what else a rank needs")
    table.add_column("")
    for column in ("min", "median", "max"):
        table.add_column(column, justify="right")
    assert forecast.sizing is not None
    on_cpu = forecast.question.device == "cpu"
    for title, side, figure, shown in _CPU_ROWS if on_cpu else _GPU_ROWS:
        spread = Spread.of(getattr(rank, figure) for rank in getattr(forecast.sizing, side))
        table.add_row(title, *map(shown, (spread.min, spread.median, spread.max)))
    return table


_Row = tuple[str, str, str, Callable[[int], str]]
_KEPT: tuple[_Row, ...] = (
    ("trainer rank, update_async: copy", "trainer_ranks", "async_bytes", _BYTES),
    ("trainer rank, delta='auto': base and changes", "trainer_ranks", "delta_bytes", _BYTES),
    ("engine rank, delta='auto': buckets", "engine_ranks", "delta_bytes", _BYTES),
    ("engine rank, staged=True: shadow weights", "engine_ranks", "staged_bytes", _BYTES),
)
_CPU_ROWS: tuple[_Row, ...] = (
    ("trainer rank, /dev/shm", "trainer_ranks", "shm_bytes", _BYTES),
    ("trainer rank, open files", "trainer_ranks", "storages", _COUNT),
    ("engine rank, mappings", "engine_ranks", "mappings", _COUNT),
    *_KEPT,
)
_GPU_ROWS: tuple[_Row, ...] = (
    ("trainer rank, CUDA IPC handles", "trainer_ranks", "allocations", _COUNT),
    ("trainer rank, /dev/shm if offloaded", "trainer_ranks", "arena_bytes", _BYTES),
    *_KEPT,
)
