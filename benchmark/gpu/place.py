"""Where a process of the battery runs: on a real GPU, or in a rehearsal on a virtual one."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")
MIB, GIB = 1 << 20, 1 << 30
DEVICE = torch.device("cuda", 0)
_MEASURE_S = 5.0


@dataclass(frozen=True)
class Place:
    """One process's GPU. Nothing of CUDA is touched before `enter`, so that processes can be forked.

    name         of the process, for errors
    rehearsed    on virtual GPUs, in a folder of which their memory is; empty on real ones
    visible      CUDA_VISIBLE_DEVICES, and on virtual GPUs the numbers that it means; None leaves it as it is
    allocator    torch's: "native", "expandable_segments" or "cudaMallocAsync"
    environment  further variables
    start        how processes are started: "fork", or "spawn" where something uses CUDA before they are
    """

    name: str
    rehearsed: str = ""
    visible: tuple[str, tuple[int, ...]] | None = None
    allocator: str = "native"
    environment: Mapping[str, str] = field(default_factory=dict)
    start: str = "fork"

    @property
    def variables(self) -> dict[str, str]:
        """What must be set before the process imports torch, or uses CUDA."""
        allocators = {
            "expandable_segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        }
        visible = {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible[0]}
        return {**allocators.get(self.allocator, {}), **visible, **self.environment}

    def enter(self) -> None:
        """Begins to use the GPU, in the process that will."""
        os.environ.update(self.variables)
        if self.rehearsed:
            from benchmark.gpu import rehearsal

            rehearsal.enter(self)
        torch.cuda.set_device(DEVICE)
        torch.cuda.synchronize(DEVICE)

    def pick(self, real: T, rehearsed: T) -> T:
        """Returns the size that fits."""
        return rehearsed if self.rehearsed else real


def free_bytes() -> int:
    """Returns what all processes together leave of the GPU. Memory that torch keeps unused is returned first."""
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(DEVICE)[0])


def seconds_of(run: Callable[[], Any], rounds: int = 5, warmups: int = 2) -> float:
    """Returns the median seconds of `run`, from its call to the end of what it starts on the GPU.

    Of fewer rounds, if these take seconds.
    """
    found, end = list[float](), time.monotonic() + _MEASURE_S
    for number in range(warmups + rounds):
        if found and time.monotonic() > end:
            break
        torch.cuda.synchronize(DEVICE)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize(DEVICE)
        if number >= warmups:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def pattern(number: int, like: torch.Tensor) -> None:
    """Fills with bytes that depend on `number` and on their position. Kernels of torch alone, in pieces of 64 MiB."""
    flat = like.view(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), 64 * MIB):
        piece = flat[begin : begin + 64 * MIB]
        places = torch.arange(piece.numel(), dtype=torch.int32, device=flat.device)
        offset = number * 17 + begin // (64 * MIB) * 13
        piece.copy_(((places * 31 + (places >> 11) + offset) % 251).to(torch.uint8))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compares bits, so that NaNs are equal to themselves."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
