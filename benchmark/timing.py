"""One path's updates, one after another, on every trainer rank in step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from benchmark import exactness
from benchmark.memory import Rise
from benchmark.paths import UpdatePath
from benchmark.weights import Weights, version_of
from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.selftest.digests import Digests

T = TypeVar("T")


class Timed(msgspec.Struct, frozen=True):
    """What was seen of one path.

    first_seconds       of the first update, which prepares what later ones reuse
    seconds             of each timed update: the slowest trainer rank's time in the call
    reports             of the timed updates; none of stock
    trainer_peak_bytes  the most that any trainer rank's memory rose in a timed update
    before, after       digests before and after the last update, of every engine rank
    """

    path: str
    first_seconds: float
    seconds: list[float]
    reports: list[UpdateReport]
    trainer_peak_bytes: int
    before: Digests
    after: Digests


def least_bytes(timed: Sequence[Timed]) -> list[int]:
    """Of every engine rank: what it lacks, which any path has to bring. Known from our paths' reports."""
    report = next((t.reports[-1] for t in timed if t.reports), None)
    if report is None:
        raise ReshardError("no path that reports what engine ranks lack has run")
    return [rank.least_bytes for rank in report.engine_ranks]


def measure(
    name: str,
    path: UpdatePath,
    weights: Weights,
    counts: tuple[int, int],
    engine: Any,
    device: torch.device,
    folder: Path,
) -> Timed:
    """counts: (untimed, timed) updates. Reports and digests are on the rank that has the engine, its own on others."""
    warmups, updates = counts
    seconds: list[float] = []
    reports: list[UpdateReport] = []
    peak, before = 0, Digests()
    last = warmups + updates - 1
    for update in range(last + 1):
        if update == last:
            before = exactness.live(engine, folder)
        weights.become(version_of(update, last + 1))
        named = weights.named()
        took, rise, report = timed(functools.partial(path.update, named), device)
        seconds.append(took)
        if update >= warmups:
            peak = max(peak, rise)
            reports += [report] if report is not None else []
    after = exactness.live(engine, folder)
    dist.barrier()
    return Timed(name, seconds[0], seconds[warmups:], reports, peak, before, after)


def timed(call: Callable[[], T], device: torch.device) -> tuple[float, int, T]:
    """Seconds and extra bytes of a call, of whichever trainer rank had more of each, and what it returns here."""
    rise = Rise(device)
    _synchronize(device)
    dist.barrier()
    started = time.perf_counter()
    value = call()
    _synchronize(device)
    mine = torch.tensor([time.perf_counter() - started, rise.bytes()], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine[0]), int(mine[1]), value


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
