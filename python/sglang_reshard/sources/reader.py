"""Reads one input tensor: the checkpoint tensors it represents, their shardings, and this rank's local shards.

Errors name the trainer rank and the tensor. `where` is both, "trainer rank 1: model.norm.weight".
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import ITEM_BYTES, Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap, canonical, invalid_reason
from sglang_reshard.layout.source_layout import (
    LocalShard,
    Mesh,
    MeshSharding,
    Placement,
    Sharding,
    compute_local_shapes,
    compute_shard_map,
)
from sglang_reshard.sources.dtensor import (
    LEFT_TO_RIGHT,
    ShardOrder,
    local_tensor,
    mesh_sharding,
    own_part,
    shard_order,
)
from sglang_reshard.sources.memory_identity import is_flattened, is_partitioned
from sglang_reshard.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from sglang_reshard.sources.flat import FlatBuffer
    from sglang_reshard.sources.fsdp import ShardedParameters


class TensorReader:
    """Reads the tensors of one training state on one trainer rank. Common parts of tensors are read once.

    partial  each trainer rank may state only its own part
    """

    def __init__(self, trainer_rank: int, global_ranks: tuple[int, ...], partial: bool = False) -> None:
        self._rank, self._ranks, self._partial = trainer_rank, len(global_ranks), partial
        self._trainer_rank_of = {g: t for t, g in enumerate(global_ranks)}
        self._replicated = MeshSharding(Mesh((self._ranks,), tuple(range(self._ranks))), (Placement(),))
        # Keyed by identity, as comparing device meshes is slow. The mesh is kept, so that its id stays unique.
        self._known: dict[tuple[Any, ...], tuple[Any, MeshSharding]] = {}
        self._checked: set[tuple[tuple[int, ...], Sharding]] = set()
        self._fsdp: ShardedParameters | None = None

    def read(self, name: str, given: Any, sharding: Any) -> tuple[torch.Tensor, str, Iterable[LocalShard]]:
        """Reads one entry of `describe`'s named tensors, and raises as it does.

        Returns the local tensor, the dtype (torch's name), and the local shards of the checkpoint tensors that it
        represents, which are views of the local tensor: one, or those of a fused tensor.
        """
        where = f"trainer rank {self._rank}: {name}"
        if not isinstance(name, str):
            raise Unsupported(
                f"{where}: a name must be a string, not a {type(name).__name__}; pass (name, tensor) pairs"
            )
        if not isinstance(given, torch.Tensor):
            raise Unsupported(f"{where} is a {type(given).__name__}, not a torch.Tensor; leave it out")
        if sharding is None and is_partitioned(given):
            from sglang_reshard.sources.flat import partition

            return self._read_flat(where, *partition(where, name, given))
        fused, spec = None, sharding
        if sharding is not None and not isinstance(sharding, ExplicitSharding):
            from sglang_reshard.sources.flat import FlatBuffer
            from sglang_reshard.sources.fused import FusedTensor
            from sglang_reshard.sources.verl_shard_spec import fused_tensor_of

            if isinstance(sharding, FlatBuffer):
                return self._read_flat(where, given, sharding)
            fused = sharding if isinstance(sharding, FusedTensor) else fused_tensor_of(where, sharding)
            spec = fused.spec if fused else sharding
        tensor = given if spec is not None else self._registered(where, given)
        shape, found, local = self._described(where, tensor, spec)
        _check_carried(where, local)
        shard_map = self._checked_shard_map(where, shape, found)
        shaped = _shaped(where, shape, found, local, self._rank)
        # A rank outside the tensor's mesh has an empty local tensor of any dtype.
        dtype = str(tensor.dtype).removeprefix("torch.")
        if fused is None:
            return local, dtype, [LocalShard(name, shape, found, shaped)]
        from sglang_reshard.sources.fused import split_fused

        return local, dtype, split_fused(where, fused.slices, shape, shard_map, shaped, self._rank)

    def _registered(self, where: str, given: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or the sharded parameter if it is FSDP2's unsharded copy of one."""
        if is_flattened(given):
            raise Unsupported(
                f"{where} belongs to a flat parameter of FSDP1 and does not tell its sharding; pass the module itself, "
                "or sglang_reshard.sources.named_shards(module)"
            )
        if self._fsdp is None:
            # Not in the constructor: a generator of named tensors may run a forward before its first.
            registry = sys.modules.get("torch.distributed._composable_state")  # see `fsdp`
            if registry is None or not getattr(registry, "_module_state_mapping", True):
                return given
            from sglang_reshard.sources.fsdp import ShardedParameters

            self._fsdp = ShardedParameters.of_this_process()
        return self._fsdp.of(where, given)

    def _read_flat(
        self, where: str, given: torch.Tensor, buffer: FlatBuffer
    ) -> tuple[torch.Tensor, str, Iterable[LocalShard]]:
        from sglang_reshard.sources.flat import split_flat

        local = given.detach()
        _check_carried(where, local)
        shards = list(split_flat(where, buffer, local, self._rank, self._trainer_rank_of))
        for shard in shards:
            self._checked_shard_map(f"trainer rank {self._rank}: {shard.name}", shard.shape, shard.sharding)
        return local, str(local.dtype).removeprefix("torch."), shards

    def _described(self, where: str, tensor: torch.Tensor, spec: Any) -> tuple[tuple[int, ...], Sharding, torch.Tensor]:
        """Returns the global shape, the sharding, and the local tensor."""
        if isinstance(spec, ExplicitSharding):
            return tuple(spec.shape), canonical(spec.shard_map), tensor
        if spec is not None:
            from sglang_reshard.sources.verl_shard_spec import check_has_no_place

            check_has_no_place(where, spec)
            sharding = self._replicated if spec.mesh is None else self._on_mesh(where, spec.mesh, spec.placements)
            return tuple(spec.full_shape), sharding, tensor
        if isinstance(tensor, DTensor):
            order = shard_order(where, tensor._spec)
            sharding = self._on_mesh(where, tensor.device_mesh, tensor.placements, order)
            shape, local = tuple(tensor.shape), local_tensor(tensor)
            if hasattr(local, "__create_chunk_list__"):
                return shape, self._of_own_part(where, shape, sharding, own_part(where, shape, local)), local
            return shape, sharding, local
        return tuple(tensor.shape), self._replicated, tensor

    def _of_own_part(
        self, where: str, shape: tuple[int, ...], placed: MeshSharding, part: Box | None
    ) -> MeshSharding | ShardMap:
        """Returns the sharding of a tensor whose local tensor states its own part: `placed` if they agree."""
        boxes = [] if part is None else [part]
        if [shard.box for shard in compute_shard_map(shape, *placed).shards_of(self._rank)] == boxes:
            return placed
        if not self._partial:
            raise Unsupported(
                f"{where} is an uneven DTensor, as Megatron-FSDP's: this trainer rank holds "
                f"{part or 'nothing'} of global shape {shape}, which neither its placements nor "
                "other trainer ranks know. Pass partial=True, so that each trainer rank states its own part, or an "
                "ExplicitSharding with the parts of all trainer ranks"
            )
        return ShardMap.of((box, (0,) * len(shape), self._rank) for box in boxes)

    def _on_mesh(self, where: str, mesh: Any, placements: Any, order: ShardOrder = LEFT_TO_RIGHT) -> MeshSharding:
        key = id(mesh), tuple(placements), tuple(map(type, placements)), order  # a subclass may equal its base
        if key not in self._known:
            self._known[key] = mesh, mesh_sharding(where, mesh, key[1], self._trainer_rank_of, order)
        return self._known[key][1]

    def _checked_shard_map(self, where: str, shape: tuple[int, ...], sharding: Sharding) -> ShardMap:
        explicit = isinstance(sharding, ShardMap)
        shard_map = sharding if isinstance(sharding, ShardMap) else compute_shard_map(shape, *sharding)
        if (shape, sharding) in self._checked:
            return shard_map
        if explicit and (reason := invalid_reason(shape, shard_map, self._ranks)):
            raise Mismatch(f"{where} has an invalid explicit sharding: {reason}")
        if not self._partial and shard_map.covered_elements() != math.prod(shape):
            raise Unsupported(
                f"{where}: the trainer ranks of this update hold only {shard_map.covered_elements()} of its "
                f"{math.prod(shape)} elements. Create the sender on all ranks that hold shards of it (all ranks of its "
                "mesh, if it has one)"
            )
        self._checked.add((shape, sharding))
        return shard_map


def _check_carried(where: str, local: torch.Tensor) -> None:
    """Raises Unsupported for a local tensor whose memory is not simply its elements."""
    if local.layout is not torch.strided:
        raise Unsupported(f"{where} is a {local.layout} tensor; pass a dense one")
    if local.device.type == "meta":
        raise Unsupported(f"{where} is on the meta device and has no data; materialize it first")
    if is_traceable_wrapper_subclass(local):
        raise Unsupported(
            f"{where} is a {type(local).__name__}, which wraps other tensors; pass the wrapped tensors, or a plain one"
        )
    if str(local.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise Unsupported(f"{where} has the unsupported dtype {local.dtype}; cast it first")
    if local.is_neg():
        raise Unsupported(f"{where} is a negated view, whose memory has the opposite sign; pass its resolve_neg()")
    if local.numel() and not local.untyped_storage().nbytes():
        raise Unsupported(
            f"{where} no longer has memory: its storage was freed. Pass the parameter that is registered now"
        )


def _shaped(
    where: str, shape: tuple[int, ...], sharding: Sharding, local: torch.Tensor, trainer_rank: int
) -> torch.Tensor:
    """Returns the local tensor in its sharding's local shape (verl passes it flat). Raises Mismatch if it has none."""
    local = local.detach()
    if isinstance(sharding, MeshSharding):
        expected = compute_local_shapes(shape, *sharding).get(trainer_rank, (0,))
        if tuple(local.shape) == expected:
            return local
        if local.numel() == math.prod(expected) and (local.dim() == 1 or local.numel() == 0):
            return local.view(expected)
        raise Mismatch(
            f"{where} has a local shard of shape {tuple(local.shape)}, but its placements over global shape {shape} "
            f"require {expected}; was it resharded without updating its placements? If the local tensor differs from "
            "its placements on purpose, pass an ExplicitSharding"
        )
    least = sharding.min_local_shape(trainer_rank)
    if least is None:
        return local.new_empty(0)
    if local.dim() == len(least) and all(n <= m for n, m in zip(least, local.shape, strict=True)):
        return local
    if local.dim() == 1 and local.numel() == math.prod(least):
        return local.view(least)
    raise Mismatch(
        f"{where} has a local tensor of shape {tuple(local.shape)}, but its explicit sharding of global shape {shape} "
        f"needs at least {least} on this trainer rank. Pass the local tensor that the sharding refers to"
    )
