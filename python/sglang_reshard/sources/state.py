"""Reads a trainer rank's named tensors into the `SourceLayout` that all ranks share and this rank's local shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.gpu.recorded_work import RecordedWork
from sglang_reshard.layout.names import Renaming, pairs
from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import EXPLICIT, Mesh, Placement, Sharding, SourceLayout, SourceTensor
from sglang_reshard.sources.module import named_shards
from sglang_reshard.sources.reader import TensorReader

NamedTensors: TypeAlias = (
    Iterable[tuple[str, torch.Tensor] | tuple[str, torch.Tensor, Any]] | Mapping[str, torch.Tensor]
)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The layout of all trainer ranks and this rank's memory.

    shards  this rank's local tensor of each tensor of the layout, in its order. It may be larger than the shards that
            the layout has of it, and several may be the same memory: see `ShardMap`
    inputs  the local tensor of each tensor that was passed, in the order passed; None of one that is left out
    work    on the shards, after which they may be read; None if it may be anywhere on their devices
    ignored names of tensors that were passed and left out, see `Renaming`
    """

    layout: SourceLayout
    shards: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor | None, ...]
    work: RecordedWork | None = None
    ignored: tuple[str, ...] = ()

    def within(self, layout: SourceLayout) -> TrainerState:
        """Returns the state in a layout of more tensors, see `layout.union`; those it does not list are empty."""
        own = {tensor.name: shard for tensor, shard in zip(self.layout.tensors, self.shards, strict=True)}
        device = self.shards[0].device
        empty = {
            dtype: torch.empty(0, dtype=getattr(torch, dtype), device=device)
            for dtype in {tensor.dtype for tensor in layout.tensors}
        }
        shards = tuple(own.get(tensor.name, empty[tensor.dtype]) for tensor in layout.tensors)
        return replace(self, layout=layout, shards=shards)


def describe(
    named_tensors: NamedTensors | torch.nn.Module,
    *,
    trainer_rank: int,
    global_ranks: tuple[int, ...],
    partial: bool = False,
    rename: Renaming | None = None,
) -> TrainerState:
    """Reads a training state. Moves, gathers and copies nothing.

    named_tensors  (name, tensor) with a DTensor, or a plain tensor that every rank holds in full; or (name, tensor,
                   sharding). A module is read as its `named_shards`, a dict as its items
    global_ranks   the global rank of each trainer rank
    partial        the shardings may state less than all elements: what other trainer ranks hold, they state themselves
    rename         gives checkpoint tensors other names than they were passed under, or leaves them out

    The sharding is one of

    ExplicitSharding  which trainer rank holds which boxes. The tensor is then this rank's local tensor, any view of
                      any memory; it may be larger than its shards, and is empty (of the right dtype) without any
    FusedTensor       the checkpoint tensors that it represents; its own name is not among them
    a spec like verl's `ShardSpec`, with a flat local shard
    None              the tensor tells by itself

    The same tensor may be passed under several names (see `tied_names`). FSDP2's unsharded copies, which
    `named_parameters` yields between a forward and its backward, are read as the sharded parameters; see
    `sglang_reshard.sources.fsdp`.

    Raises Unsupported for placements, dtypes and tensors that cannot be sent, and Mismatch if a local tensor does not
    fit its sharding; both name the tensor and the trainer rank.
    """
    reader, tables, rename = TensorReader(trainer_rank, global_ranks, partial), LayoutTables(), rename or Renaming()
    tensors, shards, ignored = [], [], []
    inputs: list[torch.Tensor | None] = []
    passed: dict[str, str] = {}  # the name of each checkpoint tensor -> the name it was passed under
    for name, given, *shardings in as_list(named_tensors, trainer_rank):
        sharding = shardings[0] if shardings else None
        if sharding is None and rename.ignored and isinstance(name, str) and rename.ignores(rename(name)):
            ignored.append(rename(name))  # it need not even be a tensor
            inputs.append(None)
            continue
        local, dtype, local_shards = reader.read(name, given, sharding)
        for shard in local_shards:
            new = rename(shard.name)
            if rename.ignored and rename.ignores(new):
                ignored.append(new)
                continue
            if new in passed:
                raise Mismatch(f"trainer rank {trainer_rank}: {_twice(new, passed[new], shard.name)}")
            passed[new] = shard.name
            tensors.append(SourceTensor(new, shard.shape, dtype, *tables.indices(shard.sharding)))
            shards.append(shard.tensor)
        inputs.append(local)
    if not tensors:
        but = f" but those that ignore={list(rename.ignored)} leaves out" if ignored else ""
        raise Mismatch(f"trainer rank {trainer_rank}: no tensors were passed{but}")
    layout = tables.layout(len(global_ranks), tensors)
    return TrainerState(layout, tuple(shards), tuple(inputs), ignored=tuple(ignored))


def as_list(named_tensors: NamedTensors | torch.nn.Module, trainer_rank: int) -> list[tuple[Any, ...]]:
    """Returns the named tensors, a dict's items, or a module's `named_shards`, as a list.

    Raises Unsupported as `named_shards` does, and Mismatch for tensors without names.
    """
    if not isinstance(named_tensors, torch.nn.Module):
        listed = list(named_tensors if isinstance(named_tensors, list) else pairs(named_tensors))
        if listed and isinstance(listed[0], torch.Tensor):
            raise Mismatch(
                f"trainer rank {trainer_rank}: these are tensors without names; pass the model, "
                "model.named_parameters() or model.state_dict()"
            )
        return listed
    try:
        return list(named_shards(named_tensors))
    except Unsupported as error:
        raise Unsupported(f"trainer rank {trainer_rank}: {error}") from error


def _twice(name: str, first: str, second: str) -> str:
    if first == second:
        return f"the name {name} was passed twice"
    return f"{first} and {second} are both sent as {name}; pass a rename that keeps them apart, or leave one out"


def tied_names(layout: SourceLayout, shards: Sequence[torch.Tensor]) -> dict[str, str]:
    """Returns name -> earlier name of the same tensor, for tensors that were passed under several names.

    Tied tensors have the same memory, local shape and strides, and the same global shape, dtype and sharding: slices
    of a fused tensor are not tied. A rank that holds no element of a tensor cannot tell and omits it, so the result
    may differ between ranks.
    """
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for tensor, shard in zip(layout.tensors, shards, strict=True):
        if shard.numel() == 0:
            continue
        key = (
            (shard.device, shard.data_ptr(), tuple(shard.shape), shard.stride()),
            (tensor.shape, tensor.dtype, tensor.mesh, tensor.placements),
        )
        earlier = first.setdefault(key, tensor.name)
        if earlier != tensor.name:
            tied[tensor.name] = earlier
    return tied


class LayoutTables:
    """Collects the meshes, placements and explicit shard maps of a layout."""

    def __init__(self) -> None:
        self._meshes: dict[Mesh, int] = {}
        self._placements: dict[tuple[Placement, ...], int] = {}
        self._explicit: dict[ShardMap, int] = {}
        # Keyed by identity, as hashing a sharding is slow and thousands of tensors share one. It is kept, so that its
        # id stays unique.
        self._known: dict[int, tuple[Sharding, tuple[int, int]]] = {}

    def indices(self, sharding: Sharding) -> tuple[int, int]:
        """Returns `mesh` and `placements` of a `SourceTensor`."""
        if id(sharding) not in self._known:
            if isinstance(sharding, ShardMap):
                found = EXPLICIT, self._explicit.setdefault(sharding, len(self._explicit))
            else:
                mesh = self._meshes.setdefault(sharding.mesh, len(self._meshes))
                found = mesh, self._placements.setdefault(sharding.placements, len(self._placements))
            self._known[id(sharding)] = sharding, found
        return self._known[id(sharding)][1]

    def layout(self, trainer_ranks: int, tensors: Iterable[SourceTensor]) -> SourceLayout:
        tables = tuple(self._meshes), tuple(self._placements)
        return SourceLayout(trainer_ranks, *tables, tuple(tensors), tuple(self._explicit))
