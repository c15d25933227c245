"""The machine's limit: every engine rank's bytes copied once, by as many processes, all at the same time.

The memory that they copy from is shared, mapped beforehand, and written anew by another process each time;
the memory that they copy to is their own. Nothing is cast, sliced or agreed upon.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

_WARMUPS = 2
_DEADLINE_S = 120.0


class Copiers:
    """One process for each entry of `bytes_per_rank`. To be closed."""

    def __init__(self, bytes_per_rank: Sequence[int], device: str) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.multiprocessing"])
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        barrier = context.Barrier(len(bytes_per_rank))
        self._sources: list[torch.Tensor] = []
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        for rank, count in enumerate(bytes_per_rank):
            place = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
            source = torch.ones(count, dtype=torch.uint8, device=place).share_memory_()
            link, its_end = context.Pipe()
            process = context.Process(target=_copy, args=(source, its_end, barrier), daemon=True)
            process.start()
            self._sources.append(source)
            self._links.append(link)
            self._processes.append(process)
        for _ in range(_WARMUPS):
            self.seconds()

    def seconds(self) -> float:
        """All copy once: from the first one's begin to the last one's end."""
        for source in self._sources:
            source.bitwise_xor_(3)
        if self._sources[0].is_cuda:
            torch.cuda.synchronize()
        for link in self._links:
            link.send(True)
        begins, ends = zip(*map(_answer, self._links), strict=True)
        return max(ends) - min(begins)

    def close(self) -> None:
        for link, process in zip(self._links, self._processes, strict=True):
            if process.is_alive():
                link.send(False)
            process.join(10)
            if process.is_alive():
                process.kill()


def _answer(link: Connection) -> tuple[float, float]:
    """When a process began and ended, on the clock that all processes of a host share."""
    if not link.poll(_DEADLINE_S):
        raise TimeoutError(f"a copying process did not answer within {_DEADLINE_S:.0f} s")
    return link.recv()


def _copy(source: torch.Tensor, link: Connection, barrier: Any) -> None:
    """One process: copy when told to, together with the others; answer when that was."""
    torch.set_num_threads(1)  # as many as an engine rank on a host without a GPU
    own = torch.zeros_like(source, memory_format=torch.contiguous_format)
    while link.recv():
        barrier.wait(_DEADLINE_S)
        begin = time.perf_counter()
        own.copy_(source)
        if own.is_cuda:
            torch.cuda.synchronize(own.device)
        link.send((begin, time.perf_counter()))
