"""Copies of a trainer rank's shards in shared memory, for shards in the host memory of a process that uses a GPU.

Such a trainer offloads its weights to host memory that is pinned, or that is new in every step. Moved in place to
shared memory, it would lose its pinning, and other processes would have to map it and register it with CUDA again in
every update. In the arena the shards keep their places as long as they have the same shapes, even if the trainer moves
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import aligned
from sglang_reshard.memory.shm import allocate_shared, check_free_shm

ALIGNMENT = 64  # bytes


class Place(NamedTuple):
    """A view to copy. `first` is the number of the first shard that is the same view of the same memory."""

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
        self._places = places_of(shards)
        self._distinct = [number for number, place in enumerate(self._places) if place.first == number]
        sizes = [aligned(self._places[number].nbytes, ALIGNMENT) for number in self._distinct]
        check_free_shm(sum(sizes), who)
        self.storage = allocate_shared(sum(sizes), who)
        arena = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        parts = dict(zip(self._distinct, arena.split(sizes), strict=True))
        self.copies = [parts[p.first][: p.nbytes].view(p.dtype).view(p.shape) for p in self._places]
        self._targets = [self.copies[number] for number in self._distinct]
        self._sources: list[torch.Tensor] = []

    def fits(self, shards: Sequence[torch.Tensor]) -> bool:
        return self._places == places_of(shards)

    def refresh(self, shards: Sequence[torch.Tensor]) -> None:
        """Copies shards that fit."""
        self._sources = _without_owner([shards[number] for number in self._distinct])
        self.refresh_again()

    def refresh_again(self) -> None:
        """Copies the shards that were copied last, once more. Their memory must not have been freed or moved since."""
        with torch.inference_mode():
            torch._foreach_copy_(self._targets, self._sources)


def _without_owner(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the same views of the same memory, which do not keep it alive: a trainer may offload or free it."""
    storages: dict[int, torch.UntypedStorage] = {}
    views = []
    for shard in shards:
        owner = shard.untyped_storage()
        storage = storages.get(owner.data_ptr())
        if storage is None:
            storage = runtime().storage(owner.data_ptr(), owner.nbytes(), shard.device)
            storages[owner.data_ptr()] = storage
        view = torch.empty(0, dtype=shard.dtype)
        views.append(view.set_(storage, int(shard.storage_offset()), shard.shape, shard.stride()))
    return views


def places_of(shards: Sequence[torch.Tensor]) -> list[Place]:
    first: dict[object, int] = {}
    return [
        Place(first.setdefault((s.device, s.data_ptr(), s.shape, s.stride(), s.dtype), number), s.shape, s.dtype)
        for number, s in enumerate(shards)
    ]
