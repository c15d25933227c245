"""What one engine rank takes in: which box of which trainer rank's shard lands where. Exact, to the element.

An engine rank plans for itself, from its own copies alone. The work is done once for each kind of copy
(same kind of tensor, same region, landing with the same strides) and spread over its instances by numpy,
so that a rank of a model of a hundred thousand tensors is planned in seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.layout.shard_map import Shard
from sglang_reshard.plan.tensor_index import TensorIndex

if TYPE_CHECKING:  # a trainer rank plans without the tracer
    from sglang_reshard.trace import Copy

_PART_BITS, _COPY_BITS = 20, 26  # of a sort key, beside 17 for the trainer rank


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where an engine rank sits. Hosts are equal where processes can map each other's memory."""

    engine_rank: int
    engine_ranks: int
    host: str
    trainer_hosts: tuple[str, ...]

    def sees(self, piece: Shard) -> bool:
        """Whether it is held on this host."""
        return any(self.trainer_hosts[rank] == self.host for rank in piece.ranks)

    def home(self, holders: Sequence[int]) -> tuple[int, ...]:
        """The holders that are nearest: those on this host, or all, beginning at the proportional place."""
        near = [h for h in holders if self.trainer_hosts[h] == self.host] or list(holders)
        begin = self.engine_rank * len(near) // self.engine_ranks
        return tuple(near[begin:] + near[:begin])


class ReadItem(NamedTuple):
    """The part of a copy that lies in one piece.

    piece   number within the tensor's pieces
    shard   its elements in the holder's local shard
    offset  where it lands, in elements from the copy's own offset
    nbytes  in the source's dtype
    """

    piece: int
    shard: Region
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Rows `(copy[i], part[i], trainer[i])`, by trainer rank and then in the order in which they land.

    copy, part   index into `copies` and `parts`
    tensor       the layout's number of each copy's source
    repeats      rows whose elements another row of this rank brings too, and that row (empty, nearly always)
    """

    copies: Sequence[Copy]
    tensor: np.ndarray
    parts: tuple[ReadItem, ...]
    copy: np.ndarray
    part: np.ndarray
    trainer: np.ndarray
    repeats: dict[int, int]

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each row."""
        return np.array([p.nbytes for p in self.parts], np.int64)[self.part]

    def pieces(self, catalog: TensorIndex) -> np.ndarray:
        """Number of the piece that each row is of."""
        return catalog.first[self.tensor[self.copy]] + np.array([p.piece for p in self.parts], np.int64)[self.part]

    def least_bytes(self) -> int:
        """Bytes that must reach this rank at the least, in the source's dtypes."""
        nbytes = self.nbytes
        return int(nbytes.sum()) - sum(int(nbytes[row]) for row in self.repeats)

    def links(self) -> dict[int, tuple[int, int]]:
        """Trainer rank -> (bytes, rows) that are taken from it, in ascending order."""
        nbytes = np.bincount(self.trainer, self.nbytes)  # as float64, which is exact for 8 PiB
        rows = np.bincount(self.trainer)
        return {int(t): (int(nbytes[t]), int(rows[t])) for t in np.flatnonzero(rows)}

    def rows(self, trainer_rank: int) -> range:
        """The rows that are taken from a trainer rank."""
        first, last = np.searchsorted(self.trainer, [trainer_rank, trainer_rank + 1])
        return range(int(first), int(last))

    def row(self, number: int) -> tuple[Copy, ReadItem, int]:
        """A row's copy and part, and the layout's number of the tensor that it is of."""
        copy = int(self.copy[number])
        return self.copies[copy], self.parts[int(self.part[number])], int(self.tensor[copy])

    def digest(self) -> str:
        """Content hash of what is taken from whom; where it lands does not enter into it."""
        found = hashlib.sha256(repr([p.shard for p in self.parts]).encode())
        for column in (self.tensor[self.copy], self.part, self.trainer):
            found.update(np.ascontiguousarray(column).data)
        return found.hexdigest()


def plan_reads(catalog: TensorIndex, copies: Sequence[Copy], seat: RankLocation) -> ReadPlan:
    """What the engine rank in `seat` takes in for its copies.

    A piece that several trainer ranks hold is taken from those on the rank's own host, where there are
    any; the bytes are shared evenly among all that are equally near.
    """
    tensor = np.fromiter((catalog.index_of[c.source] for c in copies), np.int32, len(copies))
    spread = _Spread(catalog, tensor, seat)
    for number, of in enumerate(copies):
        spread.add(number, of)
    copy, part, position, holders = spread.rows()
    nbytes = np.array([p.nbytes for p in spread.parts], np.int64)[part]
    trainer = _share(nbytes, holders, [seat.home(h) for h in spread.holders])
    unordered = ReadPlan(copies, tensor, tuple(spread.parts), copy, part, trainer, {})
    for row, first in _repeats(unordered, spread.doubled).items():
        trainer[row] = trainer[first]
    if len(copies) >> _COPY_BITS or len(spread.parts) >> _PART_BITS:
        raise ValueError(f"{len(copies)} copies of {len(spread.parts)} kinds of parts are more than can be planned")
    place = np.empty(len(copies), np.int64)  # of each copy, in the order in which they land
    targets: dict[str, int] = {}
    landing = [(targets.setdefault(c.target, len(targets)), c.offset) for c in copies]
    place[sorted(range(len(copies)), key=landing.__getitem__)] = np.arange(len(copies))
    key = trainer.astype(np.int64) << (_COPY_BITS + _PART_BITS) | place[copy] << _PART_BITS | position
    order = np.argsort(key, kind="stable")
    taken = replace(unordered, copy=copy[order], part=part[order], trainer=trainer[order])
    return replace(taken, repeats=_repeats(taken, spread.doubled))


class _Spread:
    """Collects copies of one kind, and makes the rows of all of them at once.

    holders  sets of trainer ranks that pieces are held by
    doubled  tensors of which some region is copied twice
    """

    def __init__(self, catalog: TensorIndex, tensor: np.ndarray, seat: RankLocation) -> None:
        self._catalog, self._tensor, self._seat = catalog, tensor, seat
        self._kind_of = catalog.kind_of[tensor].tolist()
        self._alike: dict[tuple[int, Region, tuple[int, ...]], list[int]] = {}
        self._cuts: dict[tuple[int, Region], list[tuple[int, Region, tuple[int, ...], int, int]]] = {}
        self._holders: dict[tuple[int, ...], int] = {}
        self.parts: list[ReadItem] = []
        self.doubled: set[int] = set()

    @property
    def holders(self) -> list[tuple[int, ...]]:
        return list(self._holders)

    def add(self, number: int, copy: Copy) -> None:
        self._alike.setdefault((self._kind_of[number], copy.region, copy.strides), []).append(number)

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Columns: copy, part, the part's place within the copy, and number of the set of holders."""
        columns: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.int32),) * 4]
        regions: dict[tuple[int, Region], list[np.ndarray]] = {}
        for (kind, region, strides), numbers in self._alike.items():
            made = []
            for piece, shard, skipped, nbytes, holders in self._cut(kind, region):
                offset = sum(n * s for n, s in zip(skipped, strides, strict=True))
                made.append((ReadItem(piece, shard, offset, nbytes), holders))
            made.sort(key=lambda part: part[0].offset)
            parts = np.arange(len(self.parts), len(self.parts) + len(made), dtype=np.int32)
            self.parts += [part for part, _ in made]
            copies = np.array(numbers, np.int32)
            regions.setdefault((kind, region), []).append(self._tensor[copies])
            many = len(copies)
            columns.append(
                (
                    np.repeat(copies, len(made)),
                    np.tile(parts, many),
                    np.tile(np.arange(len(made), dtype=np.int32), many),
                    np.tile(np.array([holders for _, holders in made], np.int32), many),
                )
            )
        for tensors in map(np.concatenate, regions.values()):
            unique, count = np.unique(tensors, return_counts=True)
            self.doubled.update(unique[count > 1].tolist())
        copy, part, position, sets = (np.concatenate(column) for column in zip(*columns, strict=True))
        return copy, part, position, sets

    def _cut(self, kind: int, region: Region) -> list[tuple[int, Region, tuple[int, ...], int, int]]:
        """(piece, elements in the shard, steps skipped, bytes, set of holders) of a region of one kind of tensor."""
        key = kind, region
        if key not in self._cuts:
            of = self._catalog.kinds[kind]
            cuts = []
            for number, piece in self._nearest(of.shard_map.pieces):
                common = region.intersect(piece.box)
                if common is None:
                    continue
                inside, skipped = common
                holders = self._holders.setdefault(piece.ranks, len(self._holders))
                cuts.append((number, piece.to_local(inside), skipped, inside.numel * of.item_bytes, holders))
            self._cuts[key] = cuts
        return self._cuts[key]

    def _nearest(self, pieces: Sequence[Shard]) -> Iterable[tuple[int, Shard]]:
        """One piece of each box, with its number: of those that have the same, the first that is held on this host."""
        chosen: dict[Box, tuple[int, Shard]] = {}
        for number, piece in enumerate(pieces):
            known = chosen.get(piece.box)
            if known is None or (self._seat.sees(piece) and not self._seat.sees(known[1])):
                chosen[piece.box] = number, piece
        return chosen.values()


def _share(nbytes: np.ndarray, holders: np.ndarray, near: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The trainer rank that each row is taken from: of its set of holders, each gives as many bytes."""
    trainer = np.array([ranks[0] for ranks in near] or [0], np.int32)[holders]
    for number, ranks in enumerate(near):
        if len(ranks) == 1:
            continue
        own = np.flatnonzero(holders == number)
        upto = np.cumsum(nbytes[own])
        middle = upto - nbytes[own] / 2
        trainer[own] = np.array(ranks, np.int32)[(middle * len(ranks) // max(1, upto[-1])).astype(np.int64)]
    return trainer


def _repeats(taken: ReadPlan, doubled: set[int]) -> dict[int, int]:
    """Rows that bring elements of a tensor which an earlier row brings already, and that row."""
    if not doubled:
        return {}
    first: dict[tuple[int, int, Region], int] = {}
    tensors = taken.tensor[taken.copy]
    rows = np.flatnonzero(np.isin(tensors, list(doubled))).tolist()
    keys = [(int(tensors[row]), *taken.parts[taken.part[row]][:2]) for row in rows]
    return {row: first[key] for row, key in zip(rows, keys, strict=True) if first.setdefault(key, row) != row}
