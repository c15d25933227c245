"""The order in which mesh dimensions split a tensor, as torch's DTensors state it.

A layout's mesh dimensions split each tensor dimension from left to right. Any other order is the same layout over a
mesh whose dimensions are permuted, so that nothing but the code that reads a DTensor knows of orders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_reshard.layout.source_layout import Mesh, MeshSharding, Placement

Orders = Mapping[int, tuple[int, ...]]  # tensor dimension -> the mesh dimensions that split it, the first one first


def left_to_right(placements: Sequence[Placement]) -> Orders:
    """Returns the default: mesh dimensions split in ascending order."""
    found: dict[int, tuple[int, ...]] = {}
    for mesh_dim, placement in enumerate(placements):
        if placement.dim >= 0:
            found[placement.dim] = (*found.get(placement.dim, ()), mesh_dim)
    return found


def stated_by_strides(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Orders | None:
    """Returns the order that split factors state, as those of `_StridedShard` do; None if they state none.

    A mesh dimension with split factor f is preceded, in the order, by dimensions to its right whose sizes multiply to
    f. FSDP2 over tensor parallelism says so that tensor parallelism splits first.
    """
    found: dict[int, tuple[int, ...]] = {}
    for mesh_dim in reversed(range(len(placements))):
        dim, factor = placements[mesh_dim].dim, placements[mesh_dim].split_factor
        if dim < 0:
            continue
        later = found.get(dim, ())
        place = next((i for i in range(len(later) + 1) if math.prod(mesh_shape[m] for m in later[:i]) == factor), None)
        if place is None:
            return None
        found[dim] = (*later[:place], mesh_dim, *later[place:])
    return found


def is_order_of(orders: Orders, placements: Sequence[Placement]) -> bool:
    """Returns whether the orders list every mesh dimension that shards, once, with the tensor dimension it shards."""
    expected = left_to_right(placements)
    return orders.keys() == expected.keys() and all(tuple(sorted(orders[dim])) == expected[dim] for dim in expected)


def in_order(mesh: Mesh, placements: tuple[Placement, ...], orders: Orders) -> MeshSharding:
    """Returns the sharding whose mesh dimensions split in `orders`, over `mesh` with its dimensions permuted.

    Mesh dimensions that split one tensor dimension exchange their places. All others keep theirs, so that tensors
    with the default order share one mesh.
    """
    permutation = list(range(len(placements)))
    for order in orders.values():
        for place, mesh_dim in zip(sorted(order), order, strict=True):
            permutation[place] = mesh_dim
    if permutation == sorted(permutation):
        return MeshSharding(mesh, placements)
    strides = [math.prod(mesh.shape[d + 1 :]) for d in range(len(mesh.shape))]
    shape = tuple(mesh.shape[d] for d in permutation)
    ranks = [mesh.ranks[n] for n in _positions(shape, [strides[d] for d in permutation])]
    return MeshSharding(Mesh(shape, tuple(ranks)), tuple(placements[d] for d in permutation))


def in_order_of_strides(mesh: Mesh, placements: tuple[Placement, ...]) -> MeshSharding:
    """Returns the sharding that torch means by placements with split factors, uneven sizes included.

    If the split factors state an order, it is returned, and no placement is strided. Otherwise a split factor cuts a
    dimension into that number of chunks, and the mesh dimension splits each.
    """
    orders = stated_by_strides(mesh.shape, placements)
    if orders is None:
        return MeshSharding(mesh, placements)
    return in_order(mesh, tuple(Placement(p.dim) for p in placements), orders)


def _positions(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Returns the position of each element of a strided array, in row-major order."""
    found = [0]
    for size, stride in zip(shape, strides, strict=True):
        found = [position + index * stride for position in found for index in range(size)]
    return found
