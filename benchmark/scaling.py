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

import numpy as np
import torch
from rich.console import Console
from torch.distributed.tensor import DTensor

from benchmark.matrices import Matrices, MatrixParts, sharded
from benchmark.results import Row, Rows
from benchmark.world import run_world, sender, slowest, updates
from sglang_reshard.errors import ReshardError

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

    @property
    def model(self) -> Matrices:
        return Matrices("scaling", self.tensors, *self.shape)


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


# -- trainer ranks with real FSDP shards, engine ranks with a made-up loader


@dataclass(frozen=True, slots=True)
class Transported:
    """Of one transport: seconds of every update, the slowest trainer rank's; and its report's seconds by phase."""

    transport: str
    seconds: list[float]
    phases: list[dict[str, float]]
    refused: str = ""


def train(trainer: Any, point: Point, transports: tuple[str, ...], count: int) -> list[Transported]:
    state = sharded(point.model, trainer.size)
    return [_updates(trainer, transport, state, count) for transport in transports]


def _updates(trainer: Any, transport: str, state: list[tuple[str, DTensor]], count: int) -> Transported:
    sending = sender(trainer, transport)
    seen = Transported(transport, [], [])
    try:
        for update in range(count):
            for i, (_, tensor) in enumerate(state):
                tensor.to_local().fill_(value(update, i, trainer.rank))
            report, seconds = slowest(lambda: sending.update(state))
            seen.seconds.append(seconds)
            seen.phases.append(report.seconds)
    except ReshardError as error:
        return Transported(transport, [], [], str(error))
    finally:
        sending.close()
    return seen


def value(update: int, tensor: int, trainer_rank: int) -> float:
    """What a trainer rank's shard is filled with. Small whole numbers are exact in bfloat16."""
    return float((7 * update + 3 * tensor + trainer_rank) % 251)


def serve(rank: int, size: int, requests: Any, point: Point, _transports: tuple[str, ...], count: int) -> set[str]:
    """The transports after whose last update this rank had what it should have."""
    model, right = MatrixParts(rank, size, point.model, (0, 1)), set()  # as column- and row-parallel layers are
    for request in updates(model, rank, size, requests):
        if request.update == count and _is_right(model, point, count - 1, len(request.handles)):
            right.add(request.transport)
    return right


def _is_right(model: MatrixParts, point: Point, update: int, trainers: int) -> bool:
    rows, columns = point.shape
    held = rows // trainers
    with torch.no_grad():
        for i in range(point.tensors):
            whole = torch.empty(rows, columns, dtype=torch.bfloat16)
            for trainer_rank in range(trainers):
                whole.narrow(0, trainer_rank * held, held).fill_(value(update, i, trainer_rank))
            if not torch.equal(model.weights[i], model.part_of(whole, i)):
                return False
    return True


# -- the rows


def run(curves: Sequence[Curve], console: Console) -> tuple[Rows, list[str]]:
    """The rows, and notes on what was refused."""
    found: Rows = []
    notes: list[str] = []
    for curve in curves:
        for point in curve.points():
            arguments = (point.trainers, point.engine_tp, point, TRANSPORTS, WARMUPS + UPDATES)
            trainers, engines = run_world("benchmark.scaling", *arguments, deadline_s=_DEADLINE_S)
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
        "bytes": point.model.nbytes,
        "trainers": point.trainers,
        "engine_tp": point.engine_tp,
        "updates": len(seconds),
        "seconds_median": statistics.median(seconds),
        "seconds_p95": float(np.percentile(seconds, 95)),
        "move_seconds": statistics.median(of["move"] for of in phases),
        "control_seconds": statistics.median(of["total"] - of["move"] for of in phases),
        "first_seconds": seen.seconds[0],
        "exact": exact,
    }
