"""Copies of a trainer rank's shards in shared memory, for shards in the host memory of a process that uses a GPU.

Such a trainer offloads its weights to host memory that is pinned, or that is new in every step. Moved in place to
shared memory, it would lose its pinning, and other processes would have to map, and register with CUDA, all of it anew
in every update. In the arena the shards have the same places as long as they have the same shapes, wherever the trainer
keeps them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_reshard.transports.shm import allocate_shared, check_free_shm

_ALIGNMENT = 64  # bytes


class _Place(NamedTuple):
    """What is copied. `first` is the number of the first shard that is the same view of the same memory."""

    first: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class HostArena:
    """One file in shared memory, with room for shards of given shapes and dtypes, one after the other."""

    def __init__(self, shards: Sequence[torch.Tensor], who: str) -> None:
        """Raises Unsupported, naming `who`, if there is too little shared memory."""
        self._places = _places(shards)
        begins, end = [], 0
        for number, place in enumerate(self._places):
            if place.first == number:
                begins.append(end)
                end += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
            else:
                begins.append(begins[place.first])
        check_free_shm(end, who)
        self.storage = allocate_shared(end, who)
        arena = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        self.copies = [
            arena[begin : begin + place.nbytes].view(place.dtype).view(place.shape)
            for begin, place in zip(begins, self._places, strict=True)
        ]

    def fits(self, shards: Sequence[torch.Tensor]) -> bool:
        return self._places == _places(shards)

    def refresh(self, shards: Sequence[torch.Tensor]) -> None:
        """Copies shards that fit."""
        distinct = [number for number, place in enumerate(self._places) if place.first == number]
        with torch.inference_mode():
            torch._foreach_copy_([self.copies[i] for i in distinct], [shards[i] for i in distinct])


def _places(shards: Sequence[torch.Tensor]) -> list[_Place]:
    first: dict[object, int] = {}
    return [
        _Place(first.setdefault((s.data_ptr(), s.shape, s.stride(), s.dtype), number), s.shape, s.dtype)
        for number, s in enumerate(shards)
    ]
