"""Converts device meshes and placements of DTensors into those of a layout, and refuses specs with unknown fields."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.source_layout import (
    Mesh,
    MeshSharding,
    Orders,
    Placement,
    in_order,
    is_order_of,
    left_to_right,
    stated_by_strides,
)
from sglang_reshard.torch_private import AsyncCollectiveTensor, StridedShard

T = TypeVar("T")
_CURE = "pass what this trainer rank holds with an ExplicitSharding, or redistribute it"
# Of DTensorSpec in torch 2.9 to 2.14. Shape, strides and dtype of `tensor_meta` are the DTensor's own.
_KNOWN = frozenset({"mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order"})


class ShardOrder(NamedTuple):
    """The order in which mesh dimensions split a tensor.

    entries            torch's `shard_order`: (tensor dimension, the mesh dimensions that split it, the first one
                       first); None if the spec has none, so that they split from left to right
    strides_are_order  split factors of `_StridedShard` state an order
    """

    entries: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    strides_are_order: bool = True


LEFT_TO_RIGHT = ShardOrder()


def shard_order(where: str, spec: Any) -> ShardOrder:
    """Returns the shard order of a DTensorSpec.

    Raises Unsupported, starting with `where` and naming it, for a field that this package does not know and whose
    value is not the one that torch gives it by default.
    """
    known = {field.name for field in dataclasses.fields(spec)} if dataclasses.is_dataclass(spec) else set[str]()
    unknown = (known | vars(spec).keys()) - _KNOWN
    for name in sorted(n for n in unknown if not n.startswith("_") and not _is_default(spec, n)):
        raise Unsupported(
            f"{where} has a {type(spec).__name__} whose field {name} is {getattr(spec, name)!r}, which this version of "
            "sglang-reshard does not understand; redistribute it to plain placements, or pass what this trainer rank "
            "holds with an ExplicitSharding"
        )
    entries = getattr(spec, "shard_order", None)
    # Of torch before 2.11, whose placements alone tell.
    strides = getattr(spec, "use_strided_shard_as_shard_order", None)
    return ShardOrder(entries, strides is None or bool(strides))


def _is_default(spec: Any, name: str) -> bool:
    """Returns whether a field has the value that a spec of the same mesh and placements is given by its class."""
    try:
        return bool(getattr(type(spec)(spec.mesh, spec.placements, spec.tensor_meta), name) == getattr(spec, name))
    except Exception:  # of a class that is made in another way, nothing is known
        return False


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Returns a DTensor's own local tensor; nothing is gathered."""
    local = tensor._local_tensor  # with grad, to_local() returns the output of an autograd node
    # After redistribute(async_op=True) it may still be in transit.
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def own_part(where: str, shape: tuple[int, ...], local: torch.Tensor) -> Box | None:
    """Returns the part of a tensor of global `shape` (elements) that a DTensor's local tensor states; None for nothing.

    Megatron-FSDP cuts a buffer of many parameters into equal pieces, so that of each parameter ranks hold any number of
    rows. Each local tensor states its own place, in the way in which torch's distributed checkpoints ask for it.

    Raises Mismatch, starting with `where`, for a part that is not the local tensor's or is outside of the shape, and
    Unsupported for several parts.
    """
    if not local.numel():
        return None
    chunks: list[Any] = local.__create_chunk_list__()  # type: ignore[attr-defined]
    if len(chunks) != 1:
        raise Unsupported(
            f"{where} has a local tensor with {len(chunks)} chunks; pass each chunk with an ExplicitSharding"
        )
    start, sizes = (tuple(map(int, numbers)) for numbers in (chunks[0].offsets, chunks[0].sizes))
    box = Box(start, tuple(map(operator.add, start, sizes)))
    alike = len(start) == len(sizes) == len(shape) and sizes == tuple(local.shape)
    if not alike or box.intersect(Box.whole(shape)) != box:
        raise Mismatch(
            f"{where} has a local tensor of shape {tuple(local.shape)}, but states the chunk {sizes} at {start} of "
            f"global shape {shape}. Call update_uneven_dtensor_chunk_metadata on it again, or pass an ExplicitSharding"
        )
    return box


def mesh_sharding(
    where: str,
    mesh: Any,
    placements: tuple[Any, ...],
    trainer_rank_of: Mapping[int, int],
    order: ShardOrder = LEFT_TO_RIGHT,
) -> MeshSharding:
    """Returns the sharding over the root mesh. Raises Unsupported, starting with `where`.

    trainer_rank_of  global rank -> trainer rank, for the ranks that participate in the update
    order            of the mesh dimensions that split the tensor
    """
    own = tuple(_placement(where, p) for p in placements)
    own, orders = _orders(where, mesh, own, order)
    global_ranks, dims = on_root_mesh(mesh, tuple(range(len(own))), -1)
    ranks = tuple(trainer_rank_of.get(r, -1) for r in global_ranks.flatten().tolist())
    if all(r < 0 for r in ranks):
        raise Unsupported(
            f"{where} is on a mesh of global ranks {global_ranks.flatten().tolist()}, and none of these participates "
            f"in the update (global ranks {sorted(trainer_rank_of)} do). Create the sender on all ranks with weights"
        )
    of_root = tuple(own[dim] if dim >= 0 else Placement() for dim in dims)
    orders = {tensor_dim: tuple(map(dims.index, order)) for tensor_dim, order in orders.items()}
    return in_order(Mesh(tuple(global_ranks.shape), ranks), of_root, orders)


def _placement(where: str, placement: Any) -> Placement:
    kind = type(placement)
    if kind is Replicate:
        return Placement()
    if kind is Shard or kind is StridedShard:
        found = Placement(int(placement.dim), int(getattr(placement, "split_factor", 1)))
        if found.dim < 0:
            raise Unsupported(
                f"{where} has the placement {placement!r} with a negative dimension; use a dimension from 0 on"
            )
        known = Shard(found.dim) if kind is Shard else StridedShard(found.dim, split_factor=found.split_factor)
        if placement == known:
            return found
    if isinstance(placement, Partial):
        raise Unsupported(
            f"{where} has the placement {placement!r}, whose shards must be reduced first, for example with "
            "tensor.redistribute(placements=[Replicate()])"
        )
    raise Unsupported(
        f"{where} has the placement {placement!r}, a {kind.__module__}.{kind.__qualname__}; only Shard, _StridedShard "
        f"and Replicate are supported. For others, {_CURE}"
    )


def _orders(
    where: str, mesh: Any, placements: tuple[Placement, ...], order: ShardOrder
) -> tuple[tuple[Placement, ...], Orders]:
    """Returns placements without the order in their split factors, and the order."""
    default = left_to_right(placements)
    stated = default
    if order.entries is not None:
        stated = {int(dim): tuple(map(int, mesh_dims)) for dim, mesh_dims in order.entries}
    strided = any(p.split_factor > 1 for p in placements)
    by_strides = stated_by_strides(tuple(mesh.shape), placements) if strided and order.strides_are_order else None
    # torch 2.10 derives the order from the strides and states both; later ones state an order by one of the two.
    if not is_order_of(stated, placements) or (strided and stated not in (default, by_strides)):
        raise Unsupported(
            f"{where} has the placements {placements} and the shard order {order.entries}, which do not go together; "
            f"{_CURE}"
        )
    if by_strides is not None:
        return tuple(Placement(p.dim) for p in placements), by_strides
    if strided:
        return placements, default
    # Megatron-FSDP writes the order on a mesh where tensor parallelism splits first.
    listed: list[int] = list(getattr(mesh, "_shard_order", ()))
    if listed and stated == default:
        stated = {dim: tuple(sorted(mesh_dims, key=listed.index)) for dim, mesh_dims in stated.items()}
    return placements, stated


def on_root_mesh(mesh: Any, per_dim: tuple[T, ...], elsewhere: T) -> tuple[torch.Tensor, tuple[T, ...]]:
    """Returns the global ranks of the root mesh, and the parts of each of its dimensions.

    per_dim    what belongs to each dimension of `mesh`: a placement, for example
    elsewhere  what belongs to the root's other dimensions, over which a tensor is replicated

    Tensor parallelism under data parallelism has its DTensors on mesh["tp"], which differs between data-parallel
    groups. On the root mesh all ranks describe the tensor alike.
    """
    root = mesh._get_root_mesh()
    if root is mesh or root == mesh:
        return mesh.mesh, per_dim
    names, root_names = mesh.mesh_dim_names, root.mesh_dim_names
    if names is not None and root_names is not None and set(names) <= set(root_names):
        own = dict(zip(names, per_dim, strict=True))
        return root.mesh, tuple(own.get(n, elsewhere) for n in root_names)
    # Dimensions of flattened and concatenated meshes are not among the root's.
    siblings = mesh._layout.remap_to_tensor(mesh._rank_map) if hasattr(mesh, "_layout") else mesh.mesh.unsqueeze(0)
    if len(siblings) == 1:
        return mesh.mesh, per_dim
    return siblings, (elsewhere, *per_dim)
