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
from dataclasses import dataclass

import msgspec

from sglang_reshard.layout import ITEM_BYTES, Box, Region, TensorSpec

Interval = tuple[int, int]


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, the trainer ranks that hold it (ascending), and where it starts in their local tensors."""

    box: Box
    ranks: tuple[int, ...]
    at: tuple[int, ...]

    def in_shard(self, region: Region) -> Region:
        """A region of the tensor that lies in the piece, with its indices counted in a holder's local tensor."""
        start = tuple(a - b + at for a, b, at in zip(region.start, self.box.start, self.at, strict=True))
        return Region(start, region.count, region.step)


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that a mesh holds of one tensor: its pieces, and each trainer rank's local shape."""

    pieces: tuple[Piece, ...]
    local_shapes: dict[int, tuple[int, ...]]


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
def holdings(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> Holdings:
    """What every trainer rank of `mesh` holds of a tensor of `shape`."""
    held_by: dict[tuple[Box, tuple[int, ...]], list[int]] = {}
    local_shapes = {}
    for rank, coordinate in mesh.coordinates():
        dims = []
        for dim, length in enumerate(shape):
            splits = [(mesh.shape[m], coordinate[m], p.split_factor) for m, p in enumerate(placements) if p.dim == dim]
            dims.append(_split_dim(length, splits))
        local_shapes[rank] = tuple(map(_length, dims))
        offsets = [list(itertools.accumulate((b - a for a, b in d), initial=0)) for d in dims]
        for index in itertools.product(*(range(len(d)) for d in dims)):
            intervals = [d[i] for d, i in zip(dims, index, strict=True)]
            box = Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals))
            at = tuple(o[i] for o, i in zip(offsets, index, strict=True))
            held_by.setdefault((box, at), []).append(rank)
    pieces = sorted((Piece(box, tuple(sorted(r)), at) for (box, at), r in held_by.items()), key=_order)
    return Holdings(tuple(pieces), local_shapes)


def _order(piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return piece.box.start, piece.ranks


class SourceTensor(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint tensor as the trainer holds it; `mesh` and `placements` index the layout's tables."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mesh: int
    placements: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, self.dtype)


class Layout(msgspec.Struct, frozen=True):
    """All tensors of a training state, the same on every trainer rank.

    Meshes and placements are tables that the tensors point into, so that the layout of tens of
    thousands of tensors stays small on the wire.
    """

    trainer_ranks: int
    meshes: tuple[Mesh, ...]
    placements: tuple[tuple[Placement, ...], ...]
    tensors: tuple[SourceTensor, ...]

    def holdings(self, tensor: SourceTensor) -> Holdings:
        return holdings(tensor.shape, self.meshes[tensor.mesh], self.placements[tensor.placements])

    def local_bytes(self) -> tuple[int, ...]:
        """Bytes that each trainer rank holds of all tensors."""
        held = [0] * self.trainer_ranks
        # Thousands of experts are alike but for their names.
        alike = Counter((t.shape, t.dtype, t.mesh, t.placements) for t in self.tensors)
        for (shape, dtype, mesh, placements), times in alike.items():
            local_shapes = holdings(shape, self.meshes[mesh], self.placements[placements]).local_shapes
            for rank, local_shape in local_shapes.items():
                held[rank] += times * math.prod(local_shape) * ITEM_BYTES[dtype]
        return tuple(held)
