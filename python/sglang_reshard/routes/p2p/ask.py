"""Defines an engine's request to the trainer ranks that send to it, and each engine rank's request to each of them.

Trainer ranks validate them before they make views of their shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import ITEM_BYTES, MAX_STEP, LocalRegion
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.protocol.messages import MAX_BUCKET_BYTES, Text
from sglang_reshard.protocol.session import Session, of_engine
from sglang_reshard.routes.base import EngineSide, TrainerSide
from sglang_reshard.routes.p2p.links import kept_dtypes
from sglang_reshard.routes.p2p.messages import SendRequest, send_request

RoundBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BUCKET_BYTES)]
MAX_REPEATS = 16  # how often an element may be requested; loaders read it once


class Links(msgspec.Struct, frozen=True):
    """The links between trainer ranks and engine ranks of a transfer.

    read_plans   digest of each engine rank's read plan, under which its send requests are in the session
    round_bytes  bytes of one round, [trainer ranks, engine ranks]; 0 where nothing is sent
    """

    read_plans: tuple[Text, ...]
    round_bytes: tuple[tuple[RoundBytes, ...], ...]

    @classmethod
    def of(cls, read_plans: Sequence[str], round_bytes: np.ndarray) -> Links:
        return cls(tuple(read_plans), tuple(tuple(row) for row in round_bytes.tolist()))

    def any(self) -> bool:
        """Returns whether anything is sent."""
        return any(map(any, self.round_bytes))

    def of_trainer_rank(self, trainer_rank: int) -> dict[int, int]:
        """Returns engine rank -> bytes of a round, for those that a trainer rank sends to."""
        return {e: nbytes for e, nbytes in enumerate(self.round_bytes[trainer_rank]) if nbytes}

    def check(self, trainer_ranks: int) -> None:
        """Raises Mismatch unless this can be of an engine and this number of trainer ranks."""
        if len(self.round_bytes) != trainer_ranks:
            raise invalid_ask(f"round_bytes lists {len(self.round_bytes)} trainer ranks, expected {trainer_ranks}")
        engine_ranks = len(self.read_plans)
        for trainer_rank, row in enumerate(self.round_bytes):
            if len(row) != engine_ranks:
                raise invalid_ask(
                    f"round_bytes[{trainer_rank}] has {len(row)} entries, expected {engine_ranks} (one per engine rank)"
                )


class P2pAsk(msgspec.Struct, frozen=True):
    """Asks trainer ranks to prepare to send.

    backend  "gloo" or "nccl"
    groups   peer ids of the members of each communicator, ascending, see `groups`; every link's two ends are in exactly
             one of them
    """

    links: Links
    backend: Annotated[str, msgspec.Meta(pattern=r"^(gloo|nccl)\Z")]
    groups: tuple[tuple[int, ...], ...]

    def check(self, trainer_ranks: int) -> None:
        """Raises Mismatch unless every link is in exactly one communicator, and every member sends or receives."""
        self.links.check(trainer_ranks)
        peers_of: dict[int, list[int]] = {}
        for trainer_rank in range(trainer_ranks):
            for engine_rank in self.links.of_trainer_rank(trainer_rank):
                peers_of.setdefault(trainer_ranks + engine_rank, []).append(trainer_rank)
        for number, members in enumerate(self.groups):
            receivers = {member for member in members if member in peers_of}
            linked = {*receivers, *(sender for receiver in receivers for sender in peers_of.pop(receiver))}
            if not receivers or list(members) != sorted(linked):
                raise invalid_ask(
                    f"the members of communicator {number}, {members[:8]}, are not those that have links with each "
                    f"other, {sorted(linked)[:8]}"
                )
        if peers_of:
            raise invalid_ask(f"no communicator has engine rank {min(peers_of) - trainer_ranks} and those that send it")


def put_send_requests(
    session: Session, side: EngineSide, trainer_ranks: Iterable[int], as_kept: bool, can_apply: bool
) -> None:
    """Publishes what an engine rank requests of these trainer ranks.

    as_kept    see `links.engine_links`
    can_apply  see `SendRequest.delta`
    """
    reads = side.reads
    for trainer_rank in trainer_ranks:
        dtypes = list[str]()
        if as_kept:
            dtypes = kept_dtypes(reads.tensor_index.layout, reads.read_plan, side.live, trainer_rank)
        request = send_request(reads.read_plan, trainer_rank, dtypes, delta=can_apply)
        digest = side.read_plans[side.engine_rank]
        session.put(request, _key(side.request.engine, side.engine_rank, digest, trainer_rank), hashed=False)


def get_send_requests(side: TrainerSide, links: Links) -> dict[int, SendRequest]:
    """Returns what each engine rank requests of a trainer rank. Raises Mismatch for elements that it does not hold."""
    known: Mapping[int, tuple[str, SendRequest]] = side.kept.get("p2p", {})
    found: dict[int, tuple[str, SendRequest]] = {}
    for engine_rank in links.of_trainer_rank(side.trainer_rank):
        digest = links.read_plans[engine_rank]
        key = _key(side.engine, engine_rank, digest, side.trainer_rank)
        of_rank = known.get(engine_rank)
        if of_rank is None or of_rank[0] != digest:
            name = f"the send request of engine rank {engine_rank} for trainer rank {side.trainer_rank}"
            request = side.session.get(key, SendRequest, name, side.timeout_s, hashed=False)
            check_send_request(request, side.layout, side.trainer_rank, engine_rank)
            of_rank = digest, request
        side.session.client.delete_keys([key])  # no other rank reads it
        found[engine_rank] = of_rank
    side.kept["p2p"] = found
    return {engine_rank: request for engine_rank, (_, request) in found.items()}


def _key(engine: int, engine_rank: int, digest: str, trainer_rank: int) -> str:
    return of_engine(engine, f"send_request/{engine_rank}/{digest}/{trainer_rank}")


def check_send_request(request: SendRequest, layout: SourceLayout, trainer_rank: int, engine_rank: int) -> None:
    """Raises Mismatch, naming ranks and tensor, unless all regions lie within the trainer rank's shards.

    `layout` is the trainer rank's own.
    """
    who = f"send request of engine rank {engine_rank} for trainer rank {trainer_rank}"
    if len(request.tensor_ids) % 4 or len(request.tensor_ids) != len(request.region_ids):
        raise invalid_ask(
            f"its columns have {len(request.tensor_ids)} and {len(request.region_ids)} bytes; both must be equal and a "
            "multiple of 4",
            who,
        )
    tensors = np.frombuffer(request.tensor_ids, "<i4").astype(np.int64)
    elements = np.frombuffer(request.region_ids, "<i4").astype(np.int64)
    if request.dtypes or request.dtype_ids:
        numbered = len(request.dtype_ids) == len(tensors) and max(request.dtype_ids, default=-1) < len(request.dtypes)
        if not numbered or not ITEM_BYTES.keys() >= set(request.dtypes):
            raise invalid_ask(
                f"its dtypes {request.dtypes[:4]} do not match its {len(request.dtype_ids)} dtype numbers", who
            )
    if not len(tensors):
        return
    for column, size, of in ((tensors, len(layout.tensors), "tensors"), (elements, len(request.regions), "regions")):
        if column.min() < 0 or column.max() >= size:
            raise invalid_ask(f"its indices {column.min()} to {column.max()} are out of range for {size} {of}", who)
    shapes = layout.min_local_shapes(trainer_rank)
    numbers: dict[tuple[int, ...] | None, int] = {}
    kinds = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes], np.int64)
    alike, first, count = np.unique(
        kinds[tensors] * len(request.regions) + elements, return_index=True, return_counts=True
    )
    held = list(numbers)
    requested = 0
    for pair, row, times in zip(alike.tolist(), first.tolist(), count.tolist(), strict=True):
        shape, region = held[pair // len(request.regions)], request.regions[pair % len(request.regions)]
        if shape is None or not _is_within(region, shape):
            name = layout.tensors[int(tensors[row])].name
            raise invalid_ask(f"{region} exceeds its shard of {name}, which has shape {shape or (0,)}", who)
        requested += times * region.numel
    held_elements = sum(math.prod(shape) for shape in shapes if shape is not None)
    if requested > MAX_REPEATS * held_elements:
        raise invalid_ask(
            f"it requests {requested:,} elements, more than {MAX_REPEATS} times the {held_elements:,} that the trainer "
            "rank holds",
            who,
        )


def _is_within(region: LocalRegion, shape: tuple[int, ...]) -> bool:
    if region.is_flat and len(shape) == 1:
        if len(region.count) != len(region.step):
            return False
        steps = list(zip(region.count, region.step, strict=True))
        if any(n < 1 or not 1 <= s <= MAX_STEP for n, s in steps):
            return False
        return 0 <= region.start[0] < shape[0] - sum((n - 1) * s for n, s in steps)
    return region.is_within(shape)


def invalid_ask(why: str, who: str = "command of engine rank 0") -> Mismatch:
    """Returns the error for an invalid request."""
    return Mismatch(f"invalid {who}: {why}. Do both sides run the same version of sglang-reshard?")
