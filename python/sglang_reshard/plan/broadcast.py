"""Broadcast and slice: which group each piece travels in, and in which rounds of one bucket.

The engine ranks that need a piece, its audience, decide how it travels:

- an audience of one reads what it lacks from the trainer rank's memory by itself;
- a larger audience is a group: its leader reads the piece, packs it into a bucket, broadcasts the bucket,
  and every member slices out what it lacks (a `BroadcastGroup`, cut into `Bucket`s of one bucket).

Every engine rank makes this plan from what all of them know, and only its digest is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box, split
from sglang_reshard.plan.demand import RankDemand, demanded_shards
from sglang_reshard.plan.tensor_index import TensorIndex

ALIGN_BYTES = 16  # every segment of a bucket starts at a multiple, so that any dtype can view it


@dataclass(frozen=True, slots=True, order=True)
class BroadcastGroup:
    """A broadcast group: `leader` reads from `trainer_rank` and sends to all `members` (engine ranks, itself too)."""

    trainer_rank: int
    leader: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a piece at `offset` bytes of a bucket, in row-major order."""

    piece: int
    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of a lane: its segments from `first` to `last`."""

    lane: int
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segments:
    """What a lane carries, by column. `part` counts the boxes of a piece larger than a bucket; else it is -1."""

    piece: np.ndarray
    part: np.ndarray
    nbytes: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """All that moves in one update, in the order in which every rank takes its part.

    alone  for each engine rank, a bool for each piece: read by itself
    """

    bucket_bytes: int
    lanes: tuple[BroadcastGroup, ...]
    segments: tuple[Segments, ...]
    rounds: tuple[Bucket, ...]
    alone: np.ndarray

    def digest(self) -> str:
        found = hashlib.sha256(repr((self.bucket_bytes, self.lanes, self.rounds)).encode())
        for s in self.segments:
            for column in (s.piece, s.part, s.offset):
                found.update(np.ascontiguousarray(column).data)
        found.update(np.packbits(self.alone).data)
        return found.hexdigest()

    def boxes(self, catalog: TensorIndex, r: Bucket) -> list[Segment]:
        """The segments of a round."""
        of = self.segments[r.lane]
        own = slice(r.first, r.last)
        found = []
        for piece, part, offset in zip(
            of.piece[own].tolist(), of.part[own].tolist(), of.offset[own].tolist(), strict=True
        ):
            box = catalog.piece(piece).box
            if part >= 0:
                box = _parts(box, catalog.item_bytes(piece), self.bucket_bytes)[part]
            found.append(Segment(piece, box, offset))
        return found


def plan_broadcast(
    catalog: TensorIndex, needs: Sequence[RankDemand], trainer_hosts: Sequence[str], bucket_bytes: int
) -> BroadcastPlan:
    """The plan for engine ranks with these needs.

    A piece that several trainer ranks hold is taken by each engine rank from the nearest of them.
    A bucket is at least one element; `bucket_bytes` bounds it otherwise.

    Raises Unsupported when no engine rank runs on the host of a trainer rank that must be read.
    """
    topology = _Topology(tuple(trainer_hosts), tuple(n.host for n in needs))
    needed = demanded_shards(catalog, needs)
    alone = np.zeros_like(needed)
    in_lane: dict[BroadcastGroup, list[np.ndarray]] = {}
    for holders, audience, pieces in _alike(catalog, needed):
        audience_of: dict[int, list[int]] = {}
        for engine_rank in audience:
            audience_of.setdefault(topology.nearest_trainer(holders, engine_rank), []).append(engine_rank)
        for trainer_rank, listeners in audience_of.items():
            leader = topology.leader(trainer_rank, listeners)
            members = tuple(sorted({leader, *listeners}))
            if len(members) == 1:
                alone[leader, pieces] = True
            else:
                in_lane.setdefault(BroadcastGroup(trainer_rank, leader, members), []).append(pieces)
    lanes = tuple(sorted(in_lane))
    nbytes = catalog.per_piece([[p.box.numel * k.item_bytes for p in k.holdings.pieces] for k in catalog.kinds])
    cut = [
        _rounds(catalog, np.sort(np.concatenate(in_lane[lane])), nbytes, number, bucket_bytes)
        for number, lane in enumerate(lanes)
    ]
    # All ranks go through the rounds in this one order, which rules out deadlock; taking the first of
    # every lane, then the second, keeps groups that share no rank busy at the same time.
    turns = sorted((turn, r.lane, r.first, r) for _, rounds in cut for turn, r in enumerate(rounds))
    return BroadcastPlan(
        bucket_bytes, lanes, tuple(segments for segments, _ in cut), tuple(turn[-1] for turn in turns), alone
    )


def _alike(catalog: TensorIndex, needed: np.ndarray) -> list[tuple[tuple[int, ...], list[int], np.ndarray]]:
    """(holders, audience, pieces): the pieces that someone needs, put together by who holds and who needs them."""
    sets: dict[tuple[int, ...], int] = {}
    holders = catalog.per_piece(
        [[sets.setdefault(p.ranks, len(sets)) for p in k.holdings.pieces] for k in catalog.kinds]
    )
    used = np.flatnonzero(needed.any(axis=0))
    audience = np.packbits(needed[:, used], axis=0)
    pattern = np.concatenate([holders[used].astype(">u4").view(np.uint8).reshape(-1, 4).T, audience])
    if not len(used):
        return []
    keys = np.ascontiguousarray(pattern.T).view(f"V{pattern.shape[0]}").ravel()
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(keys[order][1:] != keys[order][:-1]) + 1
    ranks = list(sets)
    return [
        (ranks[int(holders[used[group[0]]])], np.flatnonzero(needed[:, used[group[0]]]).tolist(), used[group])
        for group in np.split(order, ends)
    ]


def _rounds(
    catalog: TensorIndex, pieces: np.ndarray, nbytes: np.ndarray, lane: int, bucket_bytes: int
) -> tuple[Segments, list[Bucket]]:
    """Pieces cut into buckets, in order; a piece larger than a bucket is split."""
    large = np.flatnonzero(nbytes[pieces] > bucket_bytes)
    items = {int(i): catalog.item_bytes(int(pieces[i])) for i in large}
    parts = {i: _parts(catalog.piece(int(pieces[i])).box, item, bucket_bytes) for i, item in items.items()}
    times = np.ones(len(pieces), np.int64)
    times[large] = [len(parts[int(i)]) for i in large]
    begin = np.cumsum(times) - times
    piece, part, size = (
        np.repeat(pieces, times),
        np.full(int(times.sum()), -1, np.int32),
        np.repeat(nbytes[pieces], times),
    )
    for i, boxes in parts.items():
        own = slice(int(begin[i]), int(begin[i]) + len(boxes))
        part[own] = np.arange(len(boxes))
        size[own] = [box.numel * items[i] for box in boxes]
    taken = -(-size // ALIGN_BYTES) * ALIGN_BYTES
    upto = np.cumsum(taken)
    offset = np.empty_like(size)
    rounds = []
    first = 0
    while first < len(size):
        before = int(upto[first] - taken[first])
        # The last segment of a bucket is not padded: it may end where its padding would not fit.
        last = int(np.searchsorted(upto, before + bucket_bytes, side="right"))
        if last < len(size) and upto[last] - taken[last] + size[last] <= before + bucket_bytes:
            last += 1
        last = max(last, first + 1)
        offset[first:last] = upto[first:last] - taken[first:last] - before
        rounds.append(Bucket(lane, first, last, int(upto[last - 1]) - before))
        first = last
    return Segments(piece, part, size, offset), rounds


@lru_cache(maxsize=256)  # a piece that is larger than a bucket is asked for by each of its rounds
def _parts(box: Box, item_bytes: int, bucket_bytes: int) -> tuple[Box, ...]:
    """A box cut into boxes of one bucket."""
    return tuple(split(box, max(1, bucket_bytes // item_bytes)))


@dataclass(frozen=True, slots=True)
class _Topology:
    trainer_hosts: tuple[str, ...]
    engine_hosts: tuple[str, ...]

    def nearest_trainer(self, holders: Sequence[int], engine_rank: int) -> int:
        """The holder on the engine rank's host, if any, that is nearest to its proportional place."""
        home = engine_rank * len(self.trainer_hosts) // len(self.engine_hosts)
        here = [h for h in holders if self.trainer_hosts[h] == self.engine_hosts[engine_rank]]
        return min(here or holders, key=lambda h: (abs(h - home), h))

    def leader(self, trainer_rank: int, audience: Sequence[int]) -> int:
        """Who reads a trainer rank's memory for an audience: for TP=4 to TP=16, engine rank 4k for k."""
        host = self.trainer_hosts[trainer_rank]
        here = [e for e in audience if self.engine_hosts[e] == host]
        # A rank outside the audience relays only where no member can reach the memory.
        here = here or [e for e, h in enumerate(self.engine_hosts) if h == host]
        if not here:
            raise Unsupported(
                f"no engine rank runs on the host of trainer rank {trainer_rank} ({host}), and transport='broadcast' "
                "reads shards on their own host only; use transport='p2p'"
            )
        home = trainer_rank * len(self.engine_hosts) // len(self.trainer_hosts)
        return min(here, key=lambda e: (abs(e - home), e))
