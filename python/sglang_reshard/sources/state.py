"""A trainer rank's named tensors, read into the Layout that all ranks share and this rank's local shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import (
    EXPLICIT,
    Mesh,
    MeshSharding,
    Placement,
    SourceLayout,
    SourceTensor,
)
from sglang_reshard.sources.fsdp import named_shards
from sglang_reshard.sources.reader import TensorReader

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor] | tuple[str, torch.Tensor, Any]]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The layout of all trainer ranks, and this rank's shards in the layout's order (elements in local order).

    A shard may be larger than what the layout says of it, and may be several tensors' shard: see `ShardMap`.

    locals  the local tensor that each given tensor stands for, in the order given
    """

    layout: SourceLayout
    shards: tuple[torch.Tensor, ...]
    locals: tuple[torch.Tensor, ...]


def describe(
    named_tensors: NamedTensors | torch.nn.Module,
    *,
    trainer_rank: int,
    global_ranks: tuple[int, ...],
) -> TrainerState:
    """Read a training state. Moves, gathers and copies nothing.

    named_tensors  (name, tensor), the tensor a DTensor or a plain tensor that every rank holds whole; or (name,
                   tensor, third). A module stands for its `named_shards`
    global_ranks   the global rank of each trainer rank

    The third element says what else a tensor is, and None says nothing:

    Held   how the trainer ranks hold a tensor; given with it is this rank's local tensor, any view of any
           memory, which may be larger than what it holds, and empty where it holds nothing (the dtype counts)
    Stack  which checkpoint tensors it stands for; its own name is none of them
    a spec like verl's `ShardSpec`, given with a flat local shard

    The same tensor may be given under several names (`aliases` tells). FSDP2's unsharded copies, which
    `named_parameters` yields between a forward and its backward, stand for the sharded parameters; see
    `sglang_reshard.sources.fsdp`.

    Raises Unsupported for placements, dtypes and kinds of tensors that cannot be carried, and Mismatch
    where a shard is not what is said of it; both name the tensor and the trainer rank.
    """
    reader, tables = TensorReader(trainer_rank, global_ranks), _Tables()
    tensors, shards, locals_ = [], [], []
    names: set[str] = set()
    for name, given, *third in listed(named_tensors, trainer_rank):
        read = reader.read(name, given, third[0] if third else None)
        for member in read.members:
            if member.name in names:
                raise Mismatch(f"trainer rank {trainer_rank}: the name {member.name} was given twice")
            names.add(member.name)
            tensors.append(SourceTensor(member.name, member.shape, read.dtype, *tables.numbers(member.distribution)))
            shards.append(member.shard)
        locals_.append(read.local)
    if not tensors:
        raise Mismatch(f"trainer rank {trainer_rank}: there are no tensors to send")
    return TrainerState(tables.layout(len(global_ranks), tensors), tuple(shards), tuple(locals_))


def listed(named_tensors: NamedTensors | torch.nn.Module, trainer_rank: int) -> list[tuple[Any, ...]]:
    """What is given, as a list; a module's `named_shards`. Raises Unsupported as those do."""
    if not isinstance(named_tensors, torch.nn.Module):
        return list(named_tensors)
    try:
        return list(named_shards(named_tensors))
    except Unsupported as error:
        raise Unsupported(f"trainer rank {trainer_rank}: {error}") from error


class _Tables:
    """The tables of a layout, as they grow."""

    def __init__(self) -> None:
        self._meshes: dict[Mesh, int] = {}
        self._placements: dict[tuple[Placement, ...], int] = {}
        self._explicit: dict[ShardMap, int] = {}
        # By identity: thousands of tensors share a distribution, and to hash one takes a while. Each is kept, so
        # that its id stays its own.
        self._known: dict[int, tuple[MeshSharding | ShardMap, tuple[int, int]]] = {}

    def numbers(self, distribution: MeshSharding | ShardMap) -> tuple[int, int]:
        """What a `SourceTensor` says of its mesh and placements."""
        known = self._known.get(id(distribution))
        if known is None:
            known = self._known[id(distribution)] = distribution, self._numbered(distribution)
        return known[1]

    def _numbered(self, distribution: MeshSharding | ShardMap) -> tuple[int, int]:
        if isinstance(distribution, ShardMap):
            return EXPLICIT, self._explicit.setdefault(distribution, len(self._explicit))
        return (
            self._meshes.setdefault(distribution.mesh, len(self._meshes)),
            self._placements.setdefault(distribution.placements, len(self._placements)),
        )

    def layout(self, trainer_ranks: int, tensors: Iterable[SourceTensor]) -> SourceLayout:
        return SourceLayout(
            trainer_ranks, tuple(self._meshes), tuple(self._placements), tuple(tensors), tuple(self._explicit)
        )
