"""Who holds which boxes of a tensor, and where in their local tensors. Without torch.

This is what a layout's distributions come down to: `placements` derives it from a mesh, and trainers
whose local tensors no mesh describes (several checkpoint tensors fused into one, stacked experts that
were split by hand) state it themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang_reshard.layout.regions import Box, Region


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, the trainer ranks that hold it (ascending), and where it starts in their local tensors."""

    box: Box
    ranks: tuple[int, ...]
    at: tuple[int, ...]

    def in_shard(self, region: Region) -> Region:
        """A region of the tensor that lies in the piece, with its indices counted in a holder's local tensor."""
        start = tuple(a - b + at for a, b, at in zip(region.start, self.box.start, self.at, strict=True))
        return Region(start, region.count, region.step)


class ShardMap(msgspec.Struct, frozen=True, array_like=True):
    """All that trainer ranks hold of one tensor.

    Boxes are equal or have nothing in common. A box may be in several pieces, which are then at different
    places of their ranks' local tensors. A local tensor may be larger than what its pieces fill: the rest of
    it are elements of other tensors, or padding.
    """

    pieces: tuple[Shard, ...]

    @classmethod
    def of(cls, held: Iterable[tuple[Box, tuple[int, ...], int]]) -> ShardMap:
        """From (box, where it starts in the local tensor, trainer rank), in any order."""
        ranks: dict[tuple[Box, tuple[int, ...]], set[int]] = {}
        for box, at, rank in held:
            ranks.setdefault((box, at), set()).add(rank)
        pieces = (Shard(box, tuple(sorted(r)), at) for (box, at), r in ranks.items())
        return cls(tuple(sorted(pieces, key=lambda piece: (piece.box.start, piece.ranks, piece.at))))

    def of_rank(self, trainer_rank: int) -> tuple[Shard, ...]:
        return tuple(piece for piece in self.pieces if trainer_rank in piece.ranks)

    def extent(self, trainer_rank: int) -> tuple[int, ...] | None:
        """The least shape that a rank's local tensor has; None if it holds nothing."""
        ends = [
            tuple(a + n for a, n in zip(piece.at, piece.box.shape, strict=True)) for piece in self.of_rank(trainer_rank)
        ]
        return tuple(map(max, *ends)) if len(ends) > 1 else ends[0] if ends else None

    def elements(self) -> int:
        """How many elements anyone holds."""
        return sum(box.numel for box in {piece.box for piece in self.pieces})

    def elements_by_rank(self) -> dict[int, int]:
        """Trainer rank -> elements that it holds; an element at two places of its local tensor counts once."""
        found: dict[int, int] = {}
        for rank, box in {(rank, piece.box) for piece in self.pieces for rank in piece.ranks}:
            found[rank] = found.get(rank, 0) + box.numel
        return found


@dataclass(frozen=True, slots=True)
class ExplicitSharding:
    """How a checkpoint tensor of `shape` (elements) is held, given with each trainer rank's local tensor."""

    shape: tuple[int, ...]
    holdings: ShardMap


@functools.lru_cache(maxsize=4096)
def canonical(holdings: ShardMap) -> ShardMap:
    """The same, as all trainer ranks write it, whatever the order in which each was told."""
    return ShardMap.of((piece.box, piece.at, rank) for piece in holdings.pieces for rank in piece.ranks)


@functools.lru_cache(maxsize=4096)
def fault(held: ExplicitSharding, trainer_ranks: int) -> str | None:
    """Why holdings that were stated are not those of a tensor of their shape, by so many trainer ranks."""
    for piece in held.holdings.pieces:
        if not piece.ranks or any(a >= b for a, b in itertools.pairwise(piece.ranks)):
            return f"{piece} is not held by trainer ranks in ascending order"
        if not 0 <= piece.ranks[0] <= piece.ranks[-1] < trainer_ranks:
            return f"{piece} is held by trainer ranks of which there are {trainer_ranks}"
        if not len(piece.box.start) == len(piece.box.stop) == len(piece.at) == len(held.shape):
            return f"{piece} has not the {len(held.shape)} dimensions of the shape {held.shape}"
        bounds = zip(piece.box.start, piece.box.stop, held.shape, strict=True)
        if any(not 0 <= a < b <= n for a, b, n in bounds) or any(a < 0 for a in piece.at):
            return f"{piece} is empty, or not inside the shape {held.shape}"
    common = _overlap(sorted({piece.box for piece in held.holdings.pieces}))
    return f"{common[0]} and {common[1]} have elements in common" if common else None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of these different boxes that have elements in common."""
    if len(boxes) < 2:
        return None
    starts = np.array([box.start for box in boxes], np.int64)
    stops = np.array([box.stop for box in boxes], np.int64)
    # Along the dimension in which most are apart; there a box can meet only those that begin before it ends.
    dim = max(range(starts.shape[1]), key=lambda d: len(np.unique(starts[:, d])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, dim], stops[:, dim])
    for number in range(len(boxes)):
        later = slice(number + 1, int(ends[number]))
        common = ((starts[later] < stops[number]) & (stops[later] > starts[number])).all(axis=1)
        if common.any():
            return boxes[order[number]], boxes[order[number + 1 + int(common.argmax())]]
    return None
