"""Copies a trainer rank's shards, so that an update can run while the trainer changes the weights.

The copy takes one shard's worth of memory, in one allocation for each device. While tensors and layout stay as they
are, taking a copy is one list of copies into the same memory, and the update that follows plans nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Unsupported
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.gpu.recorded_work import RecordedWork
from sglang_reshard.layout.names import Renaming
from sglang_reshard.layout.regions import aligned
from sglang_reshard.memory.host_arena import Place, places_of
from sglang_reshard.sources import NamedTensors, TrainerState, as_list, describe
from sglang_reshard.sources.memory_identity import MemoryIdentity

ALIGN_BYTES = 256


class AsyncShardCopy:
    """One trainer rank's. Holds views of the shards, and so keeps their memory alive, until `release`."""

    def __init__(self, trainer_rank: int, global_ranks: tuple[int, ...], device: torch.device | None = None) -> None:
        """`device`: of the copy; by default that of each shard."""
        self._rank, self._global_ranks, self.device = trainer_rank, global_ranks, device
        self._changes: MemoryIdentity | None = None
        self._partial = False
        self._rename: Renaming | None = None
        self._state: TrainerState | None = None
        self._places: list[Place] = []
        self._memory: tuple[torch.Tensor, ...] = ()
        self._copies = CopyList()
        self._work = RecordedWork()  # the last copy
        self.nbytes = 0

    def take(
        self, named_tensors: NamedTensors | torch.nn.Module, *, partial: bool, rename: Renaming | None = None
    ) -> TrainerState:
        """Copies the shards, see `sources.describe`, and returns the copy: the same object until the layout changes.

        Raises what `describe` raises, and Unsupported, with the bytes, if there is no memory for it.
        """
        listed = as_list(named_tensors, self._rank)
        with garbage_collector_paused():
            changes = self._changes if (partial, rename) == (self._partial, self._rename) else None
            unchanged = changes is not None and changes.unchanged(listed)
        if not unchanged:
            self._changes, self._partial, self._rename = None, partial, rename
            rank, ranks = self._rank, self._global_ranks
            given = describe(listed, trainer_rank=rank, global_ranks=ranks, partial=partial, rename=rename)
            self._prepare(given)
            self._changes = MemoryIdentity.of(listed, given.inputs, kept_alive=True)  # by views, for the copies
        assert self._state is not None
        with torch.no_grad():
            self._copies.run()
        self._work.record()
        return self._state

    def drop_sources(self) -> None:
        """Drops the views of the shards, so that their memory can be freed. The copy stays, for the next one.

        Waits for the copies.
        """
        self._work.wait()
        self._changes, self._copies = None, CopyList()

    def release(self) -> None:
        """Drops the copy, and the views of the shards."""
        self._changes, self._state, self._memory, self._copies, self.nbytes = None, None, (), CopyList(), 0

    def _prepare(self, given: TrainerState) -> None:
        """Makes the list of copies, and allocates memory unless that of the last copy will do."""
        places = places_of(given.shards)
        if self._state is None or (self._state.layout, self._places) != (given.layout, places):
            self._state, self._memory = None, ()  # free before more is allocated
            self._state, self._places = self._allocated(given, places), places
        self._copies = CopyList(movable=self._memory)  # by the first update from the copy
        for number, place in enumerate(places):
            if place.first == number and place.nbytes:
                self._copies.add(self._state.shards[number], given.shards[number].detach())
        self._copies.build()

    def _allocated(self, given: TrainerState, places: Sequence[Place]) -> TrainerState:
        """Returns a state like the given one, in separate memory; shards that are one view are one there, too."""
        sizes: dict[torch.device, int] = {}
        begins: list[tuple[torch.device, int]] = []
        for number, (place, shard) in enumerate(zip(places, given.shards, strict=True)):
            device = self.device or shard.device
            begins.append((device, sizes.get(device, 0)) if place.first == number else begins[place.first])
            if place.first == number:
                sizes[device] = begins[number][1] + aligned(place.nbytes, ALIGN_BYTES)
        self.nbytes = sum(sizes.values())
        try:
            memory = {device: torch.empty(n, dtype=torch.uint8, device=device) for device, n in sizes.items()}
        except RuntimeError as error:
            raise Unsupported(
                f"trainer rank {self._rank} cannot allocate {self.nbytes:,} bytes for the copy of its shards: {error}. "
                "Call update instead of update_async, or choose another shadow_device"
            ) from error
        self._memory = tuple(memory.values())
        shards = tuple(
            memory[device][begin : begin + place.nbytes].view(place.dtype).view(place.shape)
            for (device, begin), place in zip(begins, places, strict=True)
        )
        return TrainerState(given.layout, shards, shards, self._work, given.ignored)
