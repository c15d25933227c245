"""How long an update takes against the number of tensors, their bytes, and the engine's ranks.

Processes stand in for engine ranks: the real `WeightReceiver` on a model without SGLang, so that a point takes
seconds. What SGLang itself adds, the request's way to the schedulers, is in the cases with an engine, not here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from benchmark.results import Row, Rows
from benchmark.rows import percentile
from benchmark.world import run_world

TRANSPORTS = ("ipc", "p2p", "broadcast")
WARMUPS, UPDATES = 2, 10
_MB = 1_000_000
_DEADLINE_S = 600.0
_ALIGN = 16  # no side has more ranks


@dataclass(frozen=True, slots=True)
class Point:
    """So many tensors of so many bytes in all, from FSDP over `trainers` ranks to `engine_tp` ranks."""

    tensors: int
    bytes: int
    trainers: int
    engine_tp: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of each tensor, in bfloat16 elements: about square, sides that all ranks divide, bytes as near as may be."""
        elements = self.bytes / self.tensors / 2
        columns = max(1, round(math.sqrt(elements) / _ALIGN)) * _ALIGN
        return max(1, round(elements / columns / _ALIGN)) * _ALIGN, columns


@dataclass(frozen=True, slots=True)
class Curve:
    """name: what is held, for the title. against: the field of `Point` that is varied over `values`."""

    name: str
    against: str
    values: tuple[int, ...]
    held: Point

    def points(self) -> list[Point]:
        return [replace(self.held, **{self.against: value}) for value in self.values]


CURVES = (
    Curve("scaling: tensors, 100 MB", "tensors", (100, 300, 1_000, 3_000, 10_000), Point(0, 100 * _MB, 4, 4)),
    Curve("scaling: tensors, 1 GB", "tensors", (300, 1_000, 3_000), Point(0, 1000 * _MB, 4, 4)),
    Curve(
        "scaling: bytes, 300 tensors",
        "bytes",
        (10 * _MB, 30 * _MB, 100 * _MB, 300 * _MB, 1000 * _MB),
        Point(300, 0, 4, 4),
    ),
    Curve("scaling: engine ranks, 100 MB", "engine_tp", (2, 4, 8, 16), Point(300, 100 * _MB, 4, 0)),
)
QUICK_CURVES = (Curve("scaling: tensors, 10 MB", "tensors", (100, 1_000), Point(0, 10 * _MB, 2, 2)),)


def run(curves: Sequence[Curve], console: Console) -> tuple[Rows, list[str]]:
    """The rows, and notes on what was refused."""
    found: Rows = []
    notes: list[str] = []
    for curve in curves:
        for point in curve.points():
            arguments = (point.trainers, point.engine_tp, point, TRANSPORTS, WARMUPS + UPDATES)
            trainers, engines = run_world("benchmark.stand_ins", *arguments, deadline_s=_DEADLINE_S)
            here = []
            for seen in trainers[0]:
                if seen.refused:
                    notes.append(f"{curve.name}: {seen.transport} did not run: {seen.refused}")
                else:
                    exact = all(seen.transport in right for right in engines)
                    here.append(_row(curve, point, seen, exact))
            told = ", ".join(f"{row['path']} {row['seconds_median']:.4f} s" for row in here)
            console.print(f"{curve.name}: {getattr(point, curve.against):,}: {told}", highlight=False)
            found += here
    return found, list(dict.fromkeys(notes))


def _row(curve: Curve, point: Point, seen: Any, exact: bool) -> Row:
    """One transport at one point of a curve. control: of all of an update but moving bytes. Medians."""
    seconds, phases = seen.seconds[WARMUPS:], seen.phases[WARMUPS:]
    return {
        "case": curve.name,
        "against": curve.against,
        "path": seen.transport,
        "tensors": point.tensors,
        "bytes": 2 * math.prod(point.shape) * point.tensors,
        "trainers": point.trainers,
        "engine_tp": point.engine_tp,
        "updates": len(seconds),
        "seconds_median": statistics.median(seconds),
        "seconds_p95": percentile(seconds, 95),
        "move_seconds": statistics.median(of["move"] for of in phases),
        "control_seconds": statistics.median(of["total"] - of["move"] for of in phases),
        "first_seconds": seen.seconds[0],
        "exact": exact,
    }
