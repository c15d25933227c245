"""One given tensor: which checkpoint tensors it stands for, how they are held, and this rank's shards of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap, canonical
from sglang_reshard.layout.source_layout import MeshSharding, shard_map
from sglang_reshard.sources.checks import as_held, check_held, check_kind
from sglang_reshard.sources.dtensor import DescribedTensor, Meshes, from_dtensor, plain
from sglang_reshard.sources.fsdp import ShardedParameters
from sglang_reshard.sources.fused import FusedMember, FusedTensor, members
from sglang_reshard.sources.verl_shard_spec import from_shard_spec, stack_of


class ReadTensor(NamedTuple):
    """What was read of a given tensor.

    local    the local tensor that it stands for; the members' shards are views of it
    dtype    of all members, torch's name for it
    members  the checkpoint tensors: itself, or those of a stack
    """

    local: torch.Tensor
    dtype: str
    members: Iterable[FusedMember]


class TensorReader:
    """Reads one training state, tensor by tensor, for one trainer rank. What many tensors share is read once."""

    def __init__(self, trainer_rank: int, global_ranks: tuple[int, ...]) -> None:
        self._rank, self._ranks = trainer_rank, len(global_ranks)
        self._meshes = Meshes({g: t for t, g in enumerate(global_ranks)})
        self._checked: set[tuple[tuple[int, ...], MeshSharding | ShardMap]] = set()
        self._sharded: ShardedParameters | None = None

    def read(self, name: str, given: Any, third: Any) -> ReadTensor:
        """`given` and `third` as in `describe`, which says what is raised."""
        where = f"trainer rank {self._rank}: {name}"
        if not isinstance(given, torch.Tensor):
            raise Unsupported(f"{where} is no tensor but of the type {type(given).__name__}; leave it out")
        stack, spec = _stack_and_spec(where, third)
        tensor = given if spec is not None else self._registered(where, given)
        described = self._described(where, tensor, spec)
        check_kind(where, described.local)
        held = self._holdings(where, described)
        local = as_held(where, described, self._rank)
        # A rank outside the tensor's mesh has an empty local tensor of any dtype.
        dtype = str(tensor.dtype).removeprefix("torch.")
        if stack is None:
            return ReadTensor(
                described.local, dtype, [FusedMember(name, described.shape, described.distribution, local)]
            )
        return ReadTensor(described.local, dtype, members(where, stack.parts, described.shape, held, local, self._rank))

    def _registered(self, where: str, given: torch.Tensor) -> torch.Tensor:
        """The tensor, or the sharded parameter that it is FSDP2's copy of."""
        # Looked up late: a generator of named tensors may run a forward before its first.
        self._sharded = self._sharded or ShardedParameters.of_this_process()
        return self._sharded.of(where, given)

    def _described(self, where: str, tensor: torch.Tensor, spec: Any) -> DescribedTensor:
        if isinstance(spec, ExplicitSharding):
            return DescribedTensor(tuple(spec.shape), canonical(spec.holdings), tensor)
        if spec is not None:
            return from_shard_spec(where, tensor, spec, self._meshes)
        if isinstance(tensor, DTensor):
            return from_dtensor(where, tensor, self._meshes)
        return plain(tuple(tensor.shape), tensor, self._meshes)

    def _holdings(self, where: str, described: DescribedTensor) -> ShardMap:
        shape, distribution, _ = described
        stated = isinstance(distribution, ShardMap)
        held = distribution if isinstance(distribution, ShardMap) else shard_map(shape, *distribution)
        if (shape, distribution) not in self._checked:
            check_held(where, shape, held, self._ranks, stated=stated)
            self._checked.add((shape, distribution))
        return held


def _stack_and_spec(where: str, third: Any) -> tuple[FusedTensor | None, Any]:
    """The stack that a tensor is, if it is one, and how it is held, if it does not say so itself."""
    if third is None or isinstance(third, ExplicitSharding):
        return None, third
    stack = third if isinstance(third, FusedTensor) else stack_of(where, third)
    return stack, third if stack is None else stack.spec
