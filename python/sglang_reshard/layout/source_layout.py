"""Computes which elements each trainer rank holds from meshes and DTensor placements, without torch.

A mesh dimension either replicates a tensor or shards one of its dimensions, from left to right; any other order is the
same layout over a mesh whose dimensions are permuted (`in_order`). A rank's part of a tensor dimension is a sequence of
index intervals, in the order of its local tensor; sharding chunks that sequence as `torch.chunk` does, so that uneven
and empty shards are torch's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from sglang_reshard.layout.regions import ITEM_BYTES, Box, TensorSpec
from sglang_reshard.layout.shard_map import ShardMap

if TYPE_CHECKING:
    import torch

Orders = Mapping[int, tuple[int, ...]]  # tensor dimension -> the mesh dimensions that split it, the first one first
Interval = tuple[int, int]
_CURE = (
    "pass the same tensors in the same order on all trainer ranks, or partial=True if each trainer rank passes only "
    "its own"
)
EXPLICIT = -1  # in place of a mesh: the tensor has an explicit shard map


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """The placement of a tensor on one mesh dimension.

    dim           tensor dimension that it shards; -1 for Replicate
    split_factor  1 for Shard. Otherwise the number of chunks into which the dimension is cut first; each chunk is then
                  sharded over the mesh dimension
    """

    dim: int = -1
    split_factor: int = 1


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A device mesh: its shape, and its trainer ranks in row-major order (-1: does not participate in updates)."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class MeshSharding(NamedTuple):
    """The sharding of a tensor over a device mesh, with one placement per mesh dimension."""

    mesh: Mesh
    placements: tuple[Placement, ...]


Sharding: TypeAlias = MeshSharding | ShardMap  # a ShardMap: explicit


class LocalShard(NamedTuple):
    """A checkpoint tensor with this rank's shard of it, a view of the input's local tensor; empty if it has none."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    tensor: torch.Tensor


def _chunk(length: int, chunks: int, index: int) -> Interval:
    size = -(-length // chunks)
    return min(index * size, length), min((index + 1) * size, length)


def _take(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """Returns the intervals' indices at the positions in `window`."""
    taken, position = [], 0
    for start, stop in intervals:
        lo = max(window[0], position)
        hi = min(window[1], position + stop - start)
        if lo < hi:
            taken.append((start + lo - position, start + hi - position))
        position += stop - start
    return taken


def _length(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def _shard_dim(length: int, splits: Sequence[tuple[int, int, int]]) -> tuple[Interval, ...]:
    """Returns what a rank holds of a dimension after `splits`: (mesh size, mesh coordinate, split factor), in order."""
    held: list[Interval] = [(0, length)] if length else []
    for size, coordinate, factor in splits:
        total = _length(held)
        kept: list[Interval] = []
        for chunk in range(factor):
            lo, hi = _chunk(total, factor, chunk)
            a, b = _chunk(hi - lo, size, coordinate)
            kept += _take(held, (lo + a, lo + b))
        held = kept
    return tuple(held)


def _intervals_by_rank(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> Iterator[tuple[int, list[tuple[Interval, ...]]]]:
    """Yields (trainer rank, the intervals it holds of each dimension)."""
    for rank, coordinate in zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True):
        if rank < 0:
            continue
        dims = []
        for dim, length in enumerate(shape):
            splits = [(mesh.shape[m], coordinate[m], p.split_factor) for m, p in enumerate(placements) if p.dim == dim]
            dims.append(_shard_dim(length, splits))
        yield rank, dims


@functools.lru_cache(maxsize=65536)
def compute_shard_map(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> ShardMap:
    """Returns the shard map of a tensor of `shape` (elements) over `mesh`."""
    held = []
    for rank, dims in _intervals_by_rank(shape, mesh, placements):
        offsets = [list(itertools.accumulate((b - a for a, b in d), initial=0)) for d in dims]
        for index in itertools.product(*(range(len(d)) for d in dims)):
            intervals = [d[i] for d, i in zip(dims, index, strict=True)]
            box = Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals))
            held.append((box, tuple(o[i] for o, i in zip(offsets, index, strict=True)), rank))
    return ShardMap.of(held)


@functools.lru_cache(maxsize=65536)
def compute_local_shapes(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> dict[int, tuple[int, ...]]:
    """Returns trainer rank -> shape of its local tensor, which has no elements if the rank holds none."""
    return {rank: tuple(map(_length, dims)) for rank, dims in _intervals_by_rank(shape, mesh, placements)}


class SourceTensor(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint tensor in the trainer's sharding.

    mesh, placements  index the layout's tables; if the mesh is EXPLICIT, `placements` indexes `explicit`
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mesh: int
    placements: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, self.dtype)


class SourceLayout(msgspec.Struct, frozen=True):
    """All tensors of a training state, the same on every trainer rank.

    trainer_ranks  number of trainer ranks
    meshes, placements, explicit  tables that the tensors index, so that a layout of tens of thousands of tensors
                   is small when it is sent
    """

    trainer_ranks: int
    meshes: tuple[Mesh, ...]
    placements: tuple[tuple[Placement, ...], ...]
    tensors: tuple[SourceTensor, ...]
    explicit: tuple[ShardMap, ...] = ()

    def sharding(self, tensor: SourceTensor) -> Sharding:
        if tensor.mesh == EXPLICIT:
            return self.explicit[tensor.placements]
        return MeshSharding(self.meshes[tensor.mesh], self.placements[tensor.placements])

    def shard_map(self, tensor: SourceTensor) -> ShardMap:
        sharding = self.sharding(tensor)
        return sharding if isinstance(sharding, ShardMap) else compute_shard_map(tensor.shape, *sharding)

    def min_local_shapes(self, trainer_rank: int) -> list[tuple[int, ...] | None]:
        """Returns, per tensor, the smallest shape that the rank's local tensor can have; None if it holds nothing."""
        alike = {(t.shape, t.mesh, t.placements): t for t in self.tensors}
        shapes = {key: self.shard_map(tensor).min_local_shape(trainer_rank) for key, tensor in alike.items()}
        return [shapes[t.shape, t.mesh, t.placements] for t in self.tensors]

    def local_bytes(self) -> tuple[int, ...]:
        """Returns the bytes that each trainer rank holds; a box that is twice in a local tensor counts once."""
        held = [0] * self.trainer_ranks
        # Thousands of experts differ only in their names.
        alike = Counter((t.shape, t.dtype, t.mesh, t.placements) for t in self.tensors)
        for key, times in alike.items():
            tensor = SourceTensor("", *key)
            for rank, box in {(rank, s.box) for s in self.shard_map(tensor).shards for rank in s.ranks}:
                held[rank] += times * box.numel * ITEM_BYTES[tensor.dtype]
        return tuple(held)


def first_difference(layout: SourceLayout, other: SourceLayout, other_rank: int) -> str:
    """Returns an error message with the first tensor that differs between the layouts of trainer rank 0 and
    `other_rank`.
    """
    for a, b in zip(layout.tensors, other.tensors, strict=False):
        for field in ("name", "shape", "dtype"):
            if getattr(a, field) != getattr(b, field):
                return (
                    f"trainer ranks disagree at tensor {a.name}: its {field} is {getattr(a, field)} on trainer rank 0 "
                    f"and {getattr(b, field)} ({b.name}) on trainer rank {other_rank}; {_CURE}"
                )
        ours: Any = layout.sharding(a)
        theirs: Any = other.sharding(b)
        if isinstance(ours, ShardMap) and isinstance(theirs, ShardMap):  # the first shard, in place of hundreds
            pairs = itertools.zip_longest(ours.shards, theirs.shards)
            ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        if ours != theirs:
            return (
                f"trainer ranks disagree at tensor {a.name}: trainer rank 0 has the sharding {ours}, "
                f"trainer rank {other_rank} has {theirs}"
            )
    return (
        f"trainer rank 0 has {len(layout.tensors)} tensors, but trainer rank {other_rank} has {len(other.tensors)}; "
        f"{_CURE}"
    )


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
    positions = [0]  # of each element of the permuted mesh, in row-major order
    for size, stride in zip(shape, (strides[d] for d in permutation), strict=True):
        positions = [position + index * stride for position in positions for index in range(size)]
    ranks = [mesh.ranks[n] for n in positions]
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
