"""The algebra of DTensor placements, without torch.

A mesh dimension either replicates a tensor or splits one of its dimensions. What a rank holds of
a dimension is a sequence of index intervals, kept in the order in which its local tensor has
them; splitting cuts that sequence as `torch.chunk` does, so uneven and empty shards come out as
torch makes them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from sglang_reshard.layout.regions import ITEM_BYTES, Box, TensorSpec
from sglang_reshard.layout.shard_map import ShardMap

Interval = tuple[int, int]
EXPLICIT = -1  # the mesh of a tensor whose holdings are stated, not derived


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """What one mesh dimension does to a tensor.

    dim           the tensor dimension it splits; -1 when it replicates
    split_factor  1, or the number of parts of `_StridedShard`: the dimension is cut into that many
                  parts first, and each part is split over the mesh dimension
    """

    dim: int = -1
    split_factor: int = 1


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A device mesh: its shape, and its trainer ranks in row-major order (-1: not taking part)."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(trainer rank, mesh coordinate) of every rank that takes part."""
        places = itertools.product(*map(range, self.shape))
        return ((r, c) for r, c in zip(self.ranks, places, strict=True) if r >= 0)


class MeshSharding(NamedTuple):
    """How a tensor is distributed over a device mesh: one placement for each dimension of the mesh."""

    mesh: Mesh
    placements: tuple[Placement, ...]


def _chunk(length: int, parts: int, index: int) -> Interval:
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def _take(held: Sequence[Interval], window: Interval) -> list[Interval]:
    """The part of a sequence of intervals that lies in `window`, counted in local positions."""
    taken, position = [], 0
    for start, stop in held:
        lo = max(window[0], position)
        hi = min(window[1], position + stop - start)
        if lo < hi:
            taken.append((start + lo - position, start + hi - position))
        position += stop - start
    return taken


def _length(held: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in held)


def _split_dim(length: int, splits: Sequence[tuple[int, int, int]]) -> tuple[Interval, ...]:
    """What is left of a dimension after `splits`: (mesh size, mesh coordinate, split factor), left to right.

    FSDP2 over tensor parallelism writes `_StridedShard` to say that the mesh dimensions to its right
    split first. Taking that order, instead of torch's equivalent for even sizes, is what FSDP2
    really does to sizes that do not divide.
    """
    plain, deferred = [], []
    for i, (size, coordinate, factor) in enumerate(splits):
        later = math.prod(s for s, _, _ in splits[i + 1 :])
        if factor > 1 and factor == later:
            deferred.append((size, coordinate, 1))
        else:
            plain.append((size, coordinate, factor))
    held: list[Interval] = [(0, length)] if length else []
    for size, coordinate, factor in plain + deferred[::-1]:
        total = _length(held)
        kept: list[Interval] = []
        for part in range(factor):
            lo, hi = _chunk(total, factor, part)
            a, b = _chunk(hi - lo, size, coordinate)
            kept += _take(held, (lo + a, lo + b))
        held = kept
    return tuple(held)


@functools.lru_cache(maxsize=65536)
def shard_map(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> ShardMap:
    """What every trainer rank of `mesh` holds of a tensor of `shape`."""
    held = []
    for rank, dims in _intervals(shape, mesh, placements):
        offsets = [list(itertools.accumulate((b - a for a, b in d), initial=0)) for d in dims]
        for index in itertools.product(*(range(len(d)) for d in dims)):
            intervals = [d[i] for d, i in zip(dims, index, strict=True)]
            box = Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals))
            held.append((box, tuple(o[i] for o, i in zip(offsets, index, strict=True)), rank))
    return ShardMap.of(held)


@functools.lru_cache(maxsize=65536)
def local_shapes(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> dict[int, tuple[int, ...]]:
    """The shape of every trainer rank's local tensor, which has no elements where the rank holds none."""
    return {rank: tuple(map(_length, dims)) for rank, dims in _intervals(shape, mesh, placements)}


def _intervals(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> Iterator[tuple[int, list[tuple[Interval, ...]]]]:
    """(trainer rank, what it holds of each dimension)."""
    for rank, coordinate in mesh.coordinates():
        dims = []
        for dim, length in enumerate(shape):
            splits = [(mesh.shape[m], coordinate[m], p.split_factor) for m, p in enumerate(placements) if p.dim == dim]
            dims.append(_split_dim(length, splits))
        yield rank, dims


class SourceTensor(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint tensor as the trainer holds it.

    mesh, placements  index the layout's tables; where the mesh is EXPLICIT, `placements` indexes `explicit`
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

    Meshes, placements and explicit holdings are tables that the tensors point into, so that the layout of tens
    of thousands of tensors stays small on the wire.
    """

    trainer_ranks: int
    meshes: tuple[Mesh, ...]
    placements: tuple[tuple[Placement, ...], ...]
    tensors: tuple[SourceTensor, ...]
    explicit: tuple[ShardMap, ...] = ()

    def distribution(self, tensor: SourceTensor) -> MeshSharding | ShardMap:
        if tensor.mesh == EXPLICIT:
            return self.explicit[tensor.placements]
        return MeshSharding(self.meshes[tensor.mesh], self.placements[tensor.placements])

    def holdings(self, tensor: SourceTensor) -> ShardMap:
        distribution = self.distribution(tensor)
        return distribution if isinstance(distribution, ShardMap) else shard_map(tensor.shape, *distribution)

    def extents(self, trainer_rank: int) -> list[tuple[int, ...] | None]:
        """The least shape of a trainer rank's local tensor of each tensor; None where it holds no element."""
        known: dict[tuple[tuple[int, ...], int, int], tuple[int, ...] | None] = {}
        found = []
        for tensor in self.tensors:
            key = tensor.shape, tensor.mesh, tensor.placements
            if key not in known:
                known[key] = self._extent(tensor, trainer_rank)
            found.append(known[key])
        return found

    def _extent(self, tensor: SourceTensor, trainer_rank: int) -> tuple[int, ...] | None:
        distribution = self.distribution(tensor)
        if isinstance(distribution, ShardMap):
            return distribution.extent(trainer_rank)
        shape = local_shapes(tensor.shape, *distribution).get(trainer_rank, (0,))
        return shape if math.prod(shape) else None

    def local_bytes(self) -> tuple[int, ...]:
        """Bytes that each trainer rank holds of all tensors."""
        held = [0] * self.trainer_ranks
        # Thousands of experts are alike but for their names.
        alike = Counter((t.shape, t.dtype, t.mesh, t.placements) for t in self.tensors)
        for key, times in alike.items():
            tensor = SourceTensor("", *key)
            for rank, elements in self.holdings(tensor).elements_by_rank().items():
                held[rank] += times * elements * ITEM_BYTES[tensor.dtype]
        return tuple(held)
