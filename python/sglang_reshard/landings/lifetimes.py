"""Places tensors in memory that they share, if they are not needed at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ALIGN_BYTES = 256  # of offsets, as torch's own allocator has it on GPUs


class Lifetime(NamedTuple):
    """A tensor of `nbytes` is needed from turn `first` to turn `last`, both included."""

    first: int
    last: int
    nbytes: int


def share_memory(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Returns the offset of each tensor, and the bytes of the memory that they share.

    Those whose turns overlap do not overlap in memory. Each takes the first gap that it fits in, in order of turns.
    """
    offsets = [0] * len(lifetimes)
    alive: list[tuple[int, int, int]] = []  # (offset, end, last turn), in ascending order
    total = 0
    for number in sorted(range(len(lifetimes)), key=lambda n: lifetimes[n][:2]):
        first, last, nbytes = lifetimes[number]
        alive = [taken for taken in alive if taken[2] >= first]
        begin = 0
        for offset, end, _ in alive:
            if begin + nbytes <= offset:
                break
            begin = max(begin, -(-end // _ALIGN_BYTES) * _ALIGN_BYTES)
        offsets[number] = begin
        total = max(total, begin + nbytes)
        alive.append((begin, begin + nbytes, last))
        alive.sort()
    return offsets, total
