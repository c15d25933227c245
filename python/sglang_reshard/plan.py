"""Layout x needs -> Plan: which piece goes from which trainer rank to which engine ranks, in which rounds.

The planner is a pure function of what every rank knows, so every rank makes the same plan and only
its digest is compared. It works on *pieces*: the boxes that trainer ranks hold. The engine ranks that
need a piece, its audience, decide how it travels:

- an audience of one reads it from the trainer rank's memory, straight into its parameters (`Direct`);
- a larger audience is a group: its leader reads the piece, packs it into a bucket, broadcasts the bucket,
  and every member slices out what it lacks (`Lane`, cut into `Round`s of one bucket).

Where all share one host there is a simpler plan, `pull_plan`: every engine rank reads for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout import Box, split
from sglang_reshard.sources.placements import Layout, Piece
from sglang_reshard.trace.program import Copy

ALIGN_BYTES = 16  # every segment of a bucket starts at a multiple, so that any dtype can view it


class Needs(msgspec.Struct, frozen=True):
    """What one engine rank lacks.

    pieces       bit i is set when the rank needs elements of piece i (numpy packbits, little endian)
    least_bytes  bytes that must reach it at the least, in the source's dtypes
    host         where it runs; memory can be read only on the same host
    """

    pieces: bytes
    least_bytes: int
    host: str


@dataclass(frozen=True, slots=True)
class Direct:
    """An engine rank reads pieces, given by index, from a trainer rank's memory by itself."""

    trainer_rank: int
    engine_rank: int
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lane:
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
class Round:
    """One bucket of a lane."""

    lane: int
    segments: tuple[Segment, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that moves in one update, in the order in which every rank takes its part."""

    bucket_bytes: int
    directs: tuple[Direct, ...]
    lanes: tuple[Lane, ...]
    rounds: tuple[Round, ...]

    def digest(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    def trainer_ranks_read_by(self, engine_rank: int) -> tuple[int, ...]:
        """The trainer ranks whose memory an engine rank reads."""
        direct = {d.trainer_rank for d in self.directs if d.engine_rank == engine_rank}
        led = {lane.trainer_rank for lane in self.lanes if lane.leader == engine_rank}
        return tuple(sorted(direct | led))


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a layout in one list; tensor i has those from `first[i]` to `first[i + 1]`."""

    layout: Layout
    all: tuple[Piece, ...]
    tensor_of: tuple[int, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> Pieces:
        pieces: list[Piece] = []
        tensor_of: list[int] = []
        first = [0]
        for i, tensor in enumerate(layout.tensors):
            held = layout.holdings(tensor).pieces
            pieces += held
            tensor_of += [i] * len(held)
            first.append(len(pieces))
        return cls(layout, tuple(pieces), tuple(tensor_of), tuple(first))

    def item_bytes(self, piece: int) -> int:
        return self.layout.tensors[self.tensor_of[piece]].spec.item_bytes


def needs_of(pieces: Pieces, copies: Iterable[Copy], host: str) -> Needs:
    """What an engine rank with these copies lacks."""
    index_of = {t.name: i for i, t in enumerate(pieces.layout.tensors)}
    needed = np.zeros(len(pieces.all), dtype=bool)
    wanted = {(c.source, c.region) for c in copies}
    for source, region in wanted:
        tensor = index_of[source]
        for i in range(pieces.first[tensor], pieces.first[tensor + 1]):
            needed[i] |= region.intersect(pieces.all[i].box) is not None
    tensors = pieces.layout.tensors
    least = sum(region.numel * tensors[index_of[source]].spec.item_bytes for source, region in wanted)
    return Needs(np.packbits(needed, bitorder="little").tobytes(), least, host)


def unneeded(pieces: Pieces, needs: Sequence[Needs]) -> tuple[str, ...]:
    """Names of the tensors that no engine rank needs any part of; empty ones are not counted."""
    needed = np.any([_unpack(n.pieces, len(pieces.all)) for n in needs], axis=0)
    return tuple(
        tensor.name
        for i, tensor in enumerate(pieces.layout.tensors)
        if tensor.spec.numel and not needed[pieces.first[i] : pieces.first[i + 1]].any()
    )


def make_plan(pieces: Pieces, needs: Sequence[Needs], trainer_hosts: Sequence[str], bucket_bytes: int) -> Plan:
    """The plan for engine ranks with these needs.

    A piece that several trainer ranks hold is taken by each engine rank from the nearest of them.
    A bucket is at least one element; `bucket_bytes` bounds it otherwise.

    Raises Unsupported when no engine rank runs on the host of a trainer rank that must be read.
    """
    topology = _Topology(len(trainer_hosts), tuple(trainer_hosts), tuple(n.host for n in needs))
    needed = np.stack([_unpack(n.pieces, len(pieces.all)) for n in needs])
    directs: dict[tuple[int, int], list[int]] = {}
    lanes: dict[Lane, list[int]] = {}
    for i, piece in enumerate(pieces.all):
        audience_of: dict[int, list[int]] = {}
        for engine_rank in np.flatnonzero(needed[:, i]).tolist():
            audience_of.setdefault(topology.nearest_trainer(piece.ranks, engine_rank), []).append(engine_rank)
        for trainer_rank, audience in audience_of.items():
            leader = topology.leader(trainer_rank, audience)
            members = tuple(sorted({leader, *audience}))
            if len(members) == 1:
                directs.setdefault((trainer_rank, leader), []).append(i)
            else:
                lanes.setdefault(Lane(trainer_rank, leader, members), []).append(i)
    by_place = sorted(lanes, key=lambda lane: (lane.trainer_rank, lane.leader, lane.members))
    cut = [_rounds(pieces, lanes[lane], number, bucket_bytes) for number, lane in enumerate(by_place)]
    # All ranks go through the rounds in this one order, which rules out deadlock; taking the first of
    # every lane, then the second, keeps groups that share no rank busy at the same time.
    turns = sorted((turn, r.lane, r) for rounds in cut for turn, r in enumerate(rounds))
    return Plan(
        bucket_bytes,
        tuple(Direct(t, e, tuple(p)) for (t, e), p in sorted(directs.items())),
        tuple(by_place),
        tuple(r for _, _, r in turns),
    )


def pull_plan(pieces: Pieces, needs: Sequence[Needs], trainer_hosts: Sequence[str], bucket_bytes: int) -> Plan:
    """The plan by which every engine rank reads what it lacks by itself, from the nearest holder on its host.

    Raises Unsupported, naming the tensor and the ranks, when an engine rank's host has no holder of a piece.
    """
    topology = _Topology(len(trainer_hosts), tuple(trainer_hosts), tuple(n.host for n in needs))
    directs: dict[tuple[int, int], list[int]] = {}
    for engine_rank, need in enumerate(needs):
        for i in np.flatnonzero(_unpack(need.pieces, len(pieces.all))).tolist():
            trainer_rank = topology.nearest_trainer(pieces.all[i].ranks, engine_rank)
            if trainer_hosts[trainer_rank] != need.host:
                name = pieces.layout.tensors[pieces.tensor_of[i]].name
                raise Unsupported(
                    f"engine rank {engine_rank} on {need.host} lacks a part of {name} that no trainer rank there holds "
                    f"(trainer rank {trainer_rank} is on {trainer_hosts[trainer_rank]}), and transport='ipc' reads "
                    "memory of the same host only; use transport='broadcast'"
                )
            directs.setdefault((trainer_rank, engine_rank), []).append(i)
    return Plan(bucket_bytes, tuple(Direct(t, e, tuple(p)) for (t, e), p in sorted(directs.items())), (), ())


@dataclass(frozen=True, slots=True)
class _Topology:
    trainer_ranks: int
    trainer_hosts: tuple[str, ...]
    engine_hosts: tuple[str, ...]

    def nearest_trainer(self, holders: Sequence[int], engine_rank: int) -> int:
        """The holder on the engine rank's host, if any, that is nearest to its proportional place."""
        home = engine_rank * self.trainer_ranks // len(self.engine_hosts)
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
                f"no engine rank runs on the host of trainer rank {trainer_rank} ({host}), and shards are "
                "handed over on one host only; start the engine with a rank on every trainer host"
            )
        home = trainer_rank * len(self.engine_hosts) // self.trainer_ranks
        return min(here, key=lambda e: (abs(e - home), e))


def _unpack(packed: bytes, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little").astype(bool)


def _rounds(pieces: Pieces, indices: Sequence[int], lane: int, bucket_bytes: int) -> list[Round]:
    """Pieces cut into buckets, in order; a piece larger than what is left of a bucket is split."""
    rounds: list[Round] = []
    segments: list[Segment] = []
    used = 0

    def close() -> None:
        nonlocal segments, used
        if segments:
            rounds.append(Round(lane, tuple(segments), used))
        segments, used = [], 0

    for i in indices:
        item = pieces.item_bytes(i)
        whole = pieces.all[i].box
        if used + whole.numel * item > bucket_bytes:
            close()
        for part in split(whole, max(1, bucket_bytes // item)):
            nbytes = part.numel * item
            if used + nbytes > bucket_bytes:
                close()
            segments.append(Segment(i, part, used))
            used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    close()
    return rounds
