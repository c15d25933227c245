"""Publishes one trainer rank's shards in the session: their layout and memory handles, whenever these change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.gpu.runtime import rank_device, runtime, trainer_device
from sglang_reshard.layout.names import Renaming, ignored_remark, is_embedding
from sglang_reshard.layout.source_layout import SourceTensor, first_difference
from sglang_reshard.layout.union import union
from sglang_reshard.memory.mapping import Handles, MemoryExporter
from sglang_reshard.protocol.session import Session, handles_key
from sglang_reshard.sources import (
    NamedTensors,
    SourceLayout,
    TrainerState,
    as_list,
    describe,
    tied_names,
)
from sglang_reshard.sources.memory_identity import MemoryIdentity, NamedTensorList, own_memory
from sglang_reshard.trainer.collectives import Gathering

if TYPE_CHECKING:
    from sglang_reshard.trainer.tied_heads import TiedHeads

Weights: TypeAlias = NamedTensors | torch.nn.Module | TrainerState
Listed: TypeAlias = NamedTensorList | TrainerState
_FETCH_S = 60.0  # a layout that was published before its hash was exchanged


@dataclass(frozen=True, slots=True)
class PublishedShards:
    """This rank's shards as they are published in the session.

    layout, handles  content hashes under which they are published
    shard_bytes      bytes that each trainer rank holds
    tied             names of tensors that share the memory of another one
    devices          GPUs on which work on the shards may be under way
    device           the rank's own GPU, as it is announced
    memory           storage and address of each shard. New shards may have the handles of earlier ones: in an arena,
                     or if there are no handles
    pages            changes if other pages may be at the addresses of shards that have no handles
    remark           names the tensors that were passed and left out; empty if none were
    """

    source: SourceLayout
    layout: str
    handles: str
    shard_bytes: tuple[int, ...]
    tied: tuple[str, ...]
    devices: tuple[torch.device, ...]
    device: RankGpuInfo
    memory: tuple[tuple[int, int], ...]
    pages: tuple[object, ...]
    remark: str

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for shards with the same layout in the same memory, as long as something refers to them."""
        return self.layout, self.handles, self.memory


@dataclass(frozen=True, slots=True)
class Stages:
    """The tensors that all trainer ranks list together.

    listed  content hash of each trainer rank's layout, which is in the session
    layout  of all tensors
    """

    listed: tuple[str, ...]
    layout: SourceLayout

    @classmethod
    def of(cls, session: Session, listed: Sequence[str], known: Stages | None = None) -> Stages:
        """Returns what all ranks list: `known`, if that is the same. Layouts are fetched otherwise.

        Raises as `union` does.
        """
        if known is not None and known.listed == tuple(listed):
            return known
        distinct = list(dict.fromkeys(listed))
        layouts = [session.get(digest, SourceLayout, "the source layout", _FETCH_S) for digest in distinct]
        return cls(tuple(listed), union(layouts, [distinct.index(digest) for digest in listed]))


def check_alike(session: Session, listed: Sequence[str], timeout_s: float) -> None:
    """Raises Mismatch, naming a tensor, unless all trainer ranks have the same layout.

    listed  content hash of each trainer rank's layout, which is in the session
    """
    for rank, digest in enumerate(listed):
        if digest != listed[0]:
            first, other = (session.get(d, SourceLayout, "the source layout", timeout_s) for d in (listed[0], digest))
            raise Mismatch(first_difference(first, other, rank))


class ShardPublisher:
    """Publishes one trainer rank's shards.

    Holds no tensor of the trainer's, so that one that offloads its weights frees their memory; a `TrainerState` that it
    was given it holds until `release`.
    """

    def __init__(
        self,
        session: Session,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        shared_memory: MemoryExporter | None = None,
    ) -> None:
        """`shared_memory` exports the memory for several engines; its owner begins their updates, and closes it."""
        self._session, self._rank, self._global_ranks = session, trainer_rank, global_ranks
        self._memory = shared_memory or MemoryExporter(trainer_rank)
        self._owns_memory = shared_memory is None
        self._changes: MemoryIdentity | None = None
        self._read: TrainerState | None = None  # what was published last, if it was given as such
        self._published: PublishedShards | None = None
        self._handles: Handles | None = None
        self._stages: Stages | None = None
        self._partial = False  # whether trainer ranks list different tensors
        self._rename: Renaming | None = None
        self._heads: TiedHeads | None = None  # of a layout that may have some
        self.heads: dict[str, str] = {}  # see `TiedHeads.compare`, of what was published last

    @garbage_collector_paused()  # until the list that is made here is gone
    def publish(
        self,
        named_tensors: Weights,
        *,
        rename: Renaming | None = None,
        gathering: Gathering[str] | None = None,
    ) -> PublishedShards:
        """Publishes what has changed, and makes the shards' memory readable by other processes.

        named_tensors  a `TrainerState` counts as unchanged while it is the same object
        rename         names to publish the tensors under; a `TrainerState` has them already
        gathering      of all trainer ranks, if they list different tensors: each publishes the content hash of its list

        Waits for work on the shards that is under way on GPUs: no stream orders those who read from other processes.

        Raises Unsupported and Mismatch as `describe` does and `layout.union`. With `gathering`, all ranks raise what
        one of them does until it has ended.
        """
        if self._owns_memory:
            self._memory.begin_update()
        known, partial, state = self._stages, gathering is not None, None
        other = partial != (known is not None) or rename != self._rename
        self._partial, self._rename = partial, rename
        with gathering or nullcontext():
            listed = named_tensors if isinstance(named_tensors, TrainerState) else as_list(named_tensors, self._rank)
            if self._has_changed(listed, always=other):
                state = self._described_anew(listed)
            if gathering is not None and state is not None:
                gathering.own = self._session.put(state.layout)
            elif gathering is not None and known is not None:  # this rank lists what it did
                gathering.own = known.listed[self._rank]
        self._stages = None if gathering is None else Stages.of(self._session, gathering.of_all, known)
        if state is None and self._stages is not known:  # others list something else than before
            state = self._described_anew(listed)
        if state is not None:
            whole = state if self._stages is None else state.within(self._stages.layout)
            self._published = self._publish(whole)
            self._heads = None
            if found := list(heads(whole.layout)):
                from sglang_reshard.trainer.tied_heads import TiedHeads

                self._heads = TiedHeads.of(whole, self._rank, found)
            self._compare_heads(whole)
            if isinstance(listed, TrainerState):
                self._read = listed
            else:
                self._changes = MemoryIdentity.of(listed, state.inputs)
            return self._published
        assert self._published is not None  # the first call publishes
        _end_work(listed, self._published.devices)
        self._memory.refresh()
        if (pages := self._memory.pages()) != self._published.pages:
            self._published = replace(self._published, pages=pages)
        self._compare_heads(listed)
        return self._published

    def _compare_heads(self, listed: Listed) -> None:
        self.heads = {} if self._heads is None else self._heads.compare(_inputs(listed, self._heads.inputs))

    def shards(self, named_tensors: Weights) -> tuple[torch.Tensor, ...]:
        """Returns the shards that were published last, in the layout's order."""
        state = self._described(named_tensors)
        return (state if self._stages is None else state.within(self._stages.layout)).shards

    def _described_anew(self, listed: Listed) -> TrainerState:
        self._changes = self._read = None
        return self._described(listed)

    def _described(self, named_tensors: Weights) -> TrainerState:
        if isinstance(named_tensors, TrainerState):
            return named_tensors
        return describe(
            named_tensors,
            trainer_rank=self._rank,
            global_ranks=self._global_ranks,
            partial=self._partial,
            rename=self._rename,
        )

    def release(self) -> None:
        """Drops the `TrainerState` that was published last, if it was given as one. The next call publishes again."""
        self._read = None

    def close(self) -> None:
        if self._owns_memory:
            self._memory.close()
        self._changes = self._read = None

    def _has_changed(self, tensors: Listed, always: bool) -> bool:
        """Returns False if the tensors are those published last, unless `always` is set."""
        if isinstance(tensors, TrainerState):
            unchanged = tensors is self._read
        else:
            unchanged = self._changes is not None and self._changes.unchanged(tensors)
        return always or not unchanged or not self._memory.is_current()

    def _publish(self, state: TrainerState) -> PublishedShards:
        known, self._published = self._published, None
        devices = _devices(state.shards)
        _end_work(state, devices)
        handles = self._memory.export(state.shards, [t.name for t in state.layout.tensors])
        same_layout = known is not None and known.source == state.layout
        same_handles = known is not None and self._handles == handles
        published = PublishedShards(
            state.layout,
            known.layout if known and same_layout else self._session.put(state.layout),
            known.handles if known and same_handles else self._session.put(handles, handles_key(self._rank)),
            known.shard_bytes if known and same_layout else state.layout.local_bytes(),
            tuple(tied_names(state.layout, state.shards)),
            devices,
            rank_device(trainer_device(state.shards)),
            tuple((int(shard.untyped_storage()._cdata), shard.data_ptr()) for shard in state.shards),
            self._memory.pages(),
            ignored_remark(state.ignored),
        )
        if known is not None and published.handles != known.handles:
            self._session.client.delete_keys([handles_key(self._rank, known.handles)])
        self._handles = handles
        return published


def heads(layout: SourceLayout) -> Iterator[tuple[SourceTensor, SourceTensor, int, int]]:
    """Yields tensors outside of layers with the shape of an embedding, that embedding, and their numbers."""
    embeddings: dict[tuple[int, ...], int] = {}
    outside = [
        (number, tensor)
        for number, tensor in enumerate(layout.tensors)
        if len(tensor.shape) == 2 and not any(map(str.isdigit, tensor.name.split(".")))
    ]
    for number, tensor in outside:
        if is_embedding(tensor.name):
            embeddings.setdefault(tensor.shape, number)
    for number, tensor in outside:
        of = embeddings.get(tensor.shape, number)
        if of != number:
            yield tensor, layout.tensors[of], number, of


def _inputs(listed: Listed, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Returns the local tensors of the inputs of these numbers."""
    if isinstance(listed, TrainerState):
        found = {number: listed.inputs[number] for number in numbers}
        return {number: tensor for number, tensor in found.items() if tensor is not None}
    return {number: own_memory(listed[number][1]) for number in numbers}


def _end_work(listed: Listed, devices: tuple[torch.device, ...]) -> None:
    """Waits for work on the shards: for that which is known of, or for all of the devices."""
    if isinstance(listed, TrainerState) and listed.work is not None:
        listed.work.wait()
    else:
        runtime().synchronize(devices)


def _devices(shards: Sequence[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the GPUs that shards are on; all that this process uses if a shard's way to the host may be under way."""
    on_gpu = {shard.device for shard in shards if runtime().on_gpu(shard)}
    if not all(map(runtime().on_gpu, shards)):
        on_gpu.update(runtime().used_devices())
    return tuple(on_gpu)
