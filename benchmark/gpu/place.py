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
SCALE = 1 << 10  # a rehearsal's card has a MiB for each GiB of a real one, and so have the items' sizes
_MEASURE_S = 5.0
_PIECE = 64 * MIB  # of what is computed or compared at once, for temporary tensors are several times as large


@dataclass(frozen=True)
class Place:
    """One process's GPU. Nothing of CUDA is touched before `enter`, so that processes can be forked.

    name         of the process, for errors
    rehearsed    on virtual GPUs, in a folder of which their memory is; empty on real ones
    card_gib     memory of the card that is rehearsed, in GiB
    visible      CUDA_VISIBLE_DEVICES, and on virtual GPUs the numbers that it means; None leaves it as it is
    allocator    torch's: "native", "expandable_segments" or "cudaMallocAsync"
    environment  further variables
    start        how processes are started: "fork", or "spawn" where something uses CUDA before they are
    """

    name: str
    rehearsed: str = ""
    card_gib: int = 0
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

    def clean_up(self) -> None:
        """Frees what killed processes had of virtual GPUs, as a driver does of real ones."""
        if self.rehearsed:
            from benchmark.gpu import rehearsal

            rehearsal.clean_up(self)

    def pick(self, real: T, rehearsed: T) -> T:
        """Returns a number that does not say how much memory is taken."""
        return rehearsed if self.rehearsed else real

    def scaled(self, nbytes: int) -> int:
        """Returns how many bytes stand for `nbytes` of a real card."""
        return nbytes // SCALE if self.rehearsed else nbytes


def room() -> int:
    """Returns the bytes that an item may still take of the GPU.

    A twentieth of the card is left for contexts, for the kernels' temporary tensors and for the allocator's gaps.
    """
    return max(0, free_bytes() - int(torch.cuda.mem_get_info(DEVICE)[1]) // 20)


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
    """Fills with bytes that depend on `number`, on their position and on how many they are. Kernels of torch alone."""
    flat = like.view(-1).view(torch.uint8)
    step = _piece(flat.numel())
    for begin in range(0, flat.numel(), step):
        piece = flat[begin : begin + step]
        places = torch.arange(piece.numel(), dtype=torch.int32, device=flat.device)
        offset = number * 17 + begin // step * 13
        piece.copy_(((places * 31 + (places >> 11) + offset) % 251).to(torch.uint8))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compares bits, so that NaNs are equal to themselves. A view that is not contiguous is copied."""
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (left, right)]
    step = _piece(flat[0].numel())
    pieces = ([t[begin : begin + step] for t in flat] for begin in range(0, flat[0].numel(), step))
    return left.shape == right.shape and all(torch.equal(*pair) for pair in pieces)


def _piece(nbytes: int) -> int:
    """Returns how many of so many bytes are worked on at once: few, as temporary tensors take 20 times as much."""
    return min(_PIECE, max(64 << 10, nbytes // 256))
