"""Agrees with the other engines of an update on which of them reads a tensor from the trainer, and passes it on.

Each engine offers its live memory to the others, see `routes.relay.offers`. All of them see the same offers, and
divide the tensors alike.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import EXPLICIT, SourceLayout, SourceTensor
from sglang_reshard.layout.union import union
from sglang_reshard.memory.mapping import host_identity
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.routes.base import EngineSide, Kept, Meeting
from sglang_reshard.routes.nixl.remote_shards import RemoteShard, RemoteShards, check_remote_shards
from sglang_reshard.routes.nixl.source import NixlSource
from sglang_reshard.routes.relay.offers import Offer, OfferedMemory, OfferedRank, Relay, RelayOffers, make_offer
from sglang_reshard.routes.relay.progress import NO_OWNER, Progress, RelayLost, RelayRoute, Relays
from sglang_reshard.trace.live_shards import LiveShard, readable_shards
from sglang_reshard.trace.program import Program

_Held = tuple[OfferedMemory, SourceLayout, tuple[str, ...]]
_NO_SHARD = RemoteShard("", 0, 0, ())


class RelayMember(Kept):
    """One engine rank's part in passing on weights. Its memory is registered as long as one program writes it."""

    def __init__(self, engine_rank: int) -> None:
        self._rank = engine_rank
        self._progress = Progress(f"engine rank {engine_rank}")
        self._word: NixlSource | None = None  # its memory is read as long as anybody may ask for it
        self._source: NixlSource | None = None
        self._held: tuple[Program, _Held] | None = None

    def agree(self, meeting: Meeting, side: EngineSide, relay: Relay) -> Relays:
        """Returns what this rank reads from other engines. Raises RelayLost if it cannot. Collective."""
        self._progress.reset()  # an earlier trainer's updates had other numbers
        offers = RelayOffers(meeting.session, relay, side.reads.timeout_s, meeting.scope)
        own = self._part(offers, side)
        parts = meeting.gather("relay", own)
        if self._rank == 0:
            make_offer(meeting.session, relay, relay.own, _offer(offers, parts))
        check, of_all = offers.all()
        for name, offer in zip(relay.engines, of_all, strict=True):
            if offer.error:
                why = f"do not pass on weights to each other, because {name} cannot: {offer.error}"
                raise RelayLost("engines", why, final=offer.final)
        if of_all[relay.own].ranks[self._rank].memory != own.memory:
            raise RelayLost(f"engine rank {self._rank}", "has different memory than it offered to other engines")
        return self._relays(relay, of_all, check, offers, side)

    def passes_nothing_on(self, relay: Relay) -> None:
        """This rank reads all from the trainer in this update."""
        self._progress.stop(relay.update)

    def failed(self, request: DistributedUpdateWeightsReq) -> None:
        """This rank's weights are not what the update brings: no other engine takes them from here."""
        if "relay" in request.around:
            with contextlib.suppress(Mismatch):  # no sender of ours, and so no other engine
                self._progress.stop(Relay.of(request.around["relay"]).update)

    def release_pages(self) -> None:
        """Deregisters the weights, and lets no other engine take them from here."""
        self._progress.stop(0)
        self.close()

    def close(self) -> None:
        """Deregisters the weights."""
        if self._source is not None:
            self._source.close()
        self._source = self._held = None

    def _part(self, offers: RelayOffers, side: EngineSide) -> OfferedRank:
        try:
            memory, layout, unreadable = self._register(side)
        except ReshardError as error:
            return OfferedRank(error=str(error))
        return OfferedRank(host_identity(), offers.put(memory), offers.put(layout), unreadable)

    def _register(self, side: EngineSide) -> _Held:
        """Returns what others can read of the live weights, their layout, and the names of those that cannot be."""
        program, who = side.live, f"engine rank {self._rank}"
        if self._held is not None and self._held[0] is program:
            return self._held[1]
        self.close()
        shapes = {tensor.name: tensor.shape for tensor in side.reads.tensor_index.layout.tensors}
        found, unreadable = readable_shards(program, shapes, self._rank)
        if not found:
            raise Unsupported(f"{who}: none of its live weights can be read back as checkpoint tensors")
        if self._word is None:
            self._word = NixlSource(who, [self._progress.word])
        self._source = NixlSource(who, [shard.tensor for shard in found])
        shards = (*self._source.remote.shards, *self._word.remote.shards)
        memory = OfferedMemory(tuple(s.name for s in found), RemoteShards(self._source.remote.metadata, shards))
        held = memory, _layout(found, len(side.read_plans)), tuple(unreadable)
        self._held = program, held
        return held

    def _relays(
        self, relay: Relay, of_all: Sequence[Offer], check: int, offers: RelayOffers, side: EngineSide
    ) -> Relays:
        known = {
            offer.layout: offers.get(offer.layout, SourceLayout, f"the layout of {name}'s live weights")
            for name, offer in zip(relay.engines, of_all, strict=True)
        }
        layouts, trainers = [known[offer.layout] for offer in of_all], side.reads.tensor_index.layout
        owned_by = divide(trainers, layouts)
        routes = []
        for number, layout in enumerate(layouts):
            if number != relay.own and (owned_by == number).any():
                owned = _owned(trainers, layout, owned_by == number)
                routes += self._route(relay.engines[number], number, owned, of_all[number], offers, side)
        return Relays(owned_by, relay.own, tuple(routes), self._progress, check)

    def _route(
        self, name: str, number: int, owned: SourceLayout, offer: Offer, offers: RelayOffers, side: EngineSide
    ) -> list[RelayRoute]:
        """Returns the route from an engine, by its number, that owns these tensors, if this rank reads any of them."""
        index = TensorIndex.of(owned)
        copies = [copy for copy in side.live.copies if copy.source in index.index_of]
        if not copies:
            return []
        hosts = tuple(rank.host for rank in offer.ranks)
        location = RankLocation(self._rank, len(side.read_plans), host_identity(), hosts)
        plan = plan_reads(index, copies, location)
        memory = {}
        for rank in plan.traffic():
            what = f"the registered memory of engine rank {rank} of {name}"
            found = offers.get(offer.ranks[rank].memory, OfferedMemory, what)
            check_remote_shards(found.remote, len(found.names) + 1, f"engine rank {rank} of {name}")
            *shards, word = found.remote.shards
            by_name = dict(zip(found.names, shards, strict=True))
            in_order = tuple(by_name.get(tensor.name, _NO_SHARD) for tensor in owned.tensors)
            memory[rank] = RemoteShards(found.remote.metadata, (*in_order, word))
        return [RelayRoute(name, number, owned, plan, memory)]


def divide(layout: SourceLayout, layouts: Sequence[SourceLayout]) -> np.ndarray:
    """Returns the number of the engine that owns each of the trainer's tensors, NO_OWNER for none.

    layouts  of the engines' live weights. A tensor that one of them lacks, or holds in another dtype, is not passed on:
             it would be rounded in transit

    Each engine reads the tensors that it owns from the trainer, and all others from the engines that own them, while
    these still read: no byte travels more than twice, however many engines there are. The tensors up to any one are
    divided evenly, to the largest of them: what an engine has just read, the others read next.
    """
    held = [{t.name: (t.shape, t.dtype) for t in of_engine.tensors} for of_engine in layouts]
    found, read = np.full(len(layout.tensors), NO_OWNER, np.int32), [0] * len(layouts)
    for number, tensor in enumerate(layout.tensors):
        of_tensor = {of_engine.get(tensor.name) for of_engine in held}
        first = of_tensor.pop()
        if not of_tensor and first is not None and first[0] == tensor.shape:
            found[number] = least = read.index(min(read))
            read[least] += tensor.spec.nbytes
    return found


def _layout(shards: Sequence[LiveShard], engine_ranks: int) -> SourceLayout:
    """Returns the layout of one engine rank's weights."""
    explicit: dict[ShardMap, int] = {}
    tensors = []
    for shard in shards:
        number = explicit.setdefault(shard.sharding.shard_map, len(explicit))
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        tensors.append(SourceTensor(shard.name, shard.sharding.shape, dtype, EXPLICIT, number))
    return SourceLayout(engine_ranks, (), (), tuple(tensors), tuple(explicit))


def _owned(layout: SourceLayout, of_engine: SourceLayout, mask: np.ndarray) -> SourceLayout:
    """Returns an engine's layout of those of the trainer's tensors for which `mask` is set, in the trainer's order."""
    held = {tensor.name: tensor for tensor in of_engine.tensors}
    return msgspec.structs.replace(
        of_engine, tensors=tuple(held[t.name] for t in itertools.compress(layout.tensors, mask.tolist()))
    )


def _offer(offers: RelayOffers, parts: Sequence[OfferedRank]) -> Offer:
    """Returns an engine's offer. Called on its first rank."""
    for part in parts:
        if part.error:
            return Offer(error=part.error, final=True)
    unreadable = {name for part in parts for name in part.unreadable}
    distinct = dict.fromkeys(part.layout for part in parts)
    try:
        layouts = []
        for digest in distinct:
            layout = offers.get(digest, SourceLayout, "the layout of an engine rank's live weights")
            kept = tuple(tensor for tensor in layout.tensors if tensor.name not in unreadable)
            layouts.append(msgspec.structs.replace(layout, tensors=kept))
        number = {digest: n for n, digest in enumerate(distinct)}
        whole = union(layouts, [number[part.layout] for part in parts])
    except ReshardError as error:
        return Offer(error=str(error), final=True)
    return Offer(offers.put(whole), tuple(msgspec.structs.replace(part, unreadable=()) for part in parts))
