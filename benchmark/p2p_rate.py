"""Updates by p2p beside one contiguous message of the same bytes on the same links: `python -m benchmark.p2p_rate`.

Processes stand in for engine ranks. After each update the same processes send each other, by a gloo group of torch's
own, what the update sent on each link, as one contiguous message whose memory both sides have ready. The time of an
update is that of its moving phase, of the engine rank that takes longest; what precedes it is in `benchmark.profile`.
An update packs small tensors before it sends them and unpacks them on arrival, so that these two copies of the same
bytes by the same cores are measured as well, on both sides at once.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmark import matrices, pages, profile
from benchmark.matrices import Matrices, MatrixParts
from benchmark.results import Row
from benchmark.world import run_world, sender, updates

WARMUPS, UPDATES, DEADLINE_S = 3, 15, 300.0


class Case(NamedTuple):
    """Trainer ranks hold columns and engine ranks take rows, so that each link has a message, or both have rows."""

    model: Matrices
    trainers: int
    engines: int
    columns: bool

    @property
    def name(self) -> str:
        return f"{self.model.name}, {'columns' if self.columns else 'rows'}, {self.trainers} -> {self.engines}"

    @property
    def links(self) -> list[tuple[int, int]]:
        """Trainer rank and engine rank."""
        ranks = range(self.trainers)
        return [(t, e) for t in ranks for e in range(self.engines)] if self.columns else [(t, t) for t in ranks]

    @property
    def link_bytes(self) -> int:
        return self.model.nbytes // len(self.links)


LARGE = Matrices("large", 40, 4096, 1024)  # of 8 MiB, as models of a few billion parameters have them
CASES = (
    Case(LARGE, 4, 4, columns=False),
    Case(LARGE, 4, 4, columns=True),
    Case(matrices.DENSE, 4, 4, columns=False),
    Case(matrices.DENSE, 4, 4, columns=True),
    Case(matrices.MOE, 4, 4, columns=False),
    Case(matrices.MOE, 4, 4, columns=True),
    Case(LARGE, 1, 1, columns=False),
    Case(matrices.DENSE, 1, 1, columns=False),
    Case(matrices.MOE, 1, 1, columns=False),
)


class Yardstick:
    """A rank's contiguous messages. Trainer ranks come first in the group."""

    def __init__(self, case: Case, folder: str, *, trainer: int = -1, engine: int = -1) -> None:
        self._rank = trainer if trainer >= 0 else case.trainers + engine
        self._sends = trainer >= 0
        peers = [case.trainers + e if self._sends else t for t, e in case.links if trainer == t or engine == e]
        self._messages = [(peer, torch.zeros(case.link_bytes, dtype=torch.uint8)) for peer in peers]
        self._packed = [torch.zeros_like(memory) for _, memory in self._messages]
        size = case.trainers + case.engines
        store = dist.FileStore(str(Path(folder, "store")), size)
        self._group: Any = dist.ProcessGroupGloo(store, self._rank, size, datetime.timedelta(seconds=60))

    def seconds(self) -> tuple[float, float]:
        """Moves all messages, and copies them. Returns how long this rank took for each."""
        self._group.barrier().wait()
        began = time.perf_counter()
        move = self._group.send if self._sends else self._group.recv
        for work in [move([memory], peer, 0) for peer, memory in self._messages]:
            work.wait()
        moved = time.perf_counter() - began
        self._group.barrier().wait()
        began = time.perf_counter()
        for packed, (_, memory) in zip(self._packed, self._messages, strict=True):
            packed.copy_(memory)
        return moved, time.perf_counter() - began


def train(trainer: Any, case: Case, folder: str) -> None:
    state = matrices.sharded(case.model, case.trainers, dim=int(case.columns))
    sending, yardstick = sender(trainer, "p2p"), None
    for _ in range(WARMUPS + UPDATES):
        dist.barrier()
        sending.update(state)
        yardstick = yardstick or Yardstick(case, folder, trainer=trainer.rank)  # engine ranks wait for requests before
        yardstick.seconds()
    sending.close()


def serve(rank: int, ranks: int, requests: Any, case: Case, folder: str) -> list[tuple[float, float, float]]:
    """Returns the seconds of each update's moving phase, and of the messages and the copies after it."""
    watch, yardstick, took = profile.Watch("engine"), None, []
    for _ in updates(MatrixParts(rank, ranks, case.model), rank, ranks, requests):
        yardstick = yardstick or Yardstick(case, folder, engine=rank)
        took.append((watch.updates[-1]["move"][1], *yardstick.seconds()))
    return took


def run(case: Case) -> Row:
    """Seconds are medians; copy_seconds are of packing and unpacking; ratio is the median of message over update."""
    with tempfile.TemporaryDirectory() as folder:
        sides = case.trainers, case.engines
        _, engines = run_world("benchmark.p2p_rate", *sides, case, folder, deadline_s=DEADLINE_S)
    moved, messages, copies = (
        [max(rank[n][part] for rank in engines) for n in range(WARMUPS, len(engines[0]))] for part in range(3)
    )
    return {
        "case": case.name,
        "tensors": case.model.tensors,
        "bytes": case.model.nbytes,
        "links": len(case.links),
        "update_seconds": statistics.median(moved),
        "message_seconds": statistics.median(messages),
        "copy_seconds": statistics.median(copies),
        "ratio": statistics.median(message / update for update, message in zip(moved, messages, strict=True)),
    }


if __name__ == "__main__":
    pages.publish("p2p-rate", "python -m benchmark.p2p_rate", [run(case) for case in CASES])
