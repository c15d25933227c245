"""Point to point: trainer ranks send exactly the boxes that engine ranks lack.

    outlet = P2pSender(layout, shards, orders, shares, device)    # a trainer rank; peers as in `P2pCommunicator`
    outlet.send(peers)

    transport = P2pTransport(here)                                # an engine rank
    transport.move()

Both ends cut each link's stream into the same messages (`plan.streams`), one a round. All views and
buffers are made at construction; an update is one `_foreach_copy_` a round on either side. Two buckets
take turns: while one travels, the other is packed or landed. A message that is one contiguous box on a
side needs no bucket there: it is sent from the shard, or received into the live parameter, in place.

No deadlock can arise. All ranks go through the rounds in ascending order, and within a round nothing
waits. A trainer rank starts the sends of round k when those of round k - 2 are done, an engine rank posts
the receives of round k when it has landed round k - 2. So of all messages that have not arrived, those
of the lowest round are under way on both sides, or will be without waiting for any message that has not
arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan.broadcast import ALIGN_BYTES
from sglang_reshard.plan.p2p import BufferSlice, Message, SendRequest, messages, send_request, sent_rows
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.copies import CopyList, destination_view
from sglang_reshard.transports.p2p_communicator import P2pCommunicator, PeerBuffer, PendingOps

_BUCKETS = 2


class P2pSender:
    """A trainer rank's side: what it sends to which engine ranks.

    sent_bytes   in one update, in the shards' dtypes
    extra_bytes  of its buffers, which it holds on to as long as it exists; it keeps the shards alive, too
    """

    def __init__(
        self,
        layout: SourceLayout,
        shards: Sequence[torch.Tensor],
        orders: Mapping[int, SendRequest],
        shares: Mapping[int, int],
        device: torch.device,
    ) -> None:
        """`shards` are this rank's, in the layout's order; orders and shares (bytes a round) go by peer.

        device  where buckets are: where the peers' backend wants its messages
        """
        links = {}
        for peer, share in shares.items():
            views = [(shards[tensor][region.slices()],) for tensor, region in orders[peer].rows()]
            links[peer] = _Link.cut(layout, orders[peer], share, views)
        self._turns, self.extra_bytes = _turns(links, device, pack=True)
        self.sent_bytes = sum(link.payload_bytes for link in links.values())

    def send(self, peers: P2pCommunicator) -> None:
        """Send all rounds. Returns when the last has left; raises as `PendingOps.wait` does."""
        travelling: list[PendingOps] = []
        for turn in self._turns:
            if len(travelling) == 2:
                travelling.pop(0).wait()
            turn.copies.run()
            travelling.append(peers.send(turn.parcels))
        for travel in travelling:
            travel.wait()


class P2pTransport:
    """An engine rank's side, a `Transport`: receives from the trainer ranks in `here.shares`.

    A failure closes the peers, so that whoever waits for this rank hears of it.
    """

    def __init__(self, here: TransportContext) -> None:
        taken, layout = here.intake, here.catalog.layout
        again: dict[int, list[int]] = {}
        for row, first in taken.repeats.items():
            again.setdefault(first, []).append(row)
        links = {}
        for trainer_rank, share in here.shares.items():
            rows = sent_rows(taken, trainer_rank).tolist()
            views = [tuple(destination_view(here, r) for r in (row, *again.get(row, ()))) for row in rows]
            links[trainer_rank] = _Link.cut(layout, send_request(taken, trainer_rank), share, views)
        self._turns, self.extra_bytes = _turns(links, here.device, pack=False)
        self.read_bytes = {trainer_rank: link.payload_bytes for trainer_rank, link in links.items()}
        self.received_bytes = sum(self.read_bytes.values())
        self._peers = here.peers
        self._travelling: list[PendingOps] = []

    def move(self) -> None:
        self.start()
        self.finish()

    def start(self) -> None:
        """Post the receives of the first rounds. `finish` must follow."""
        self._travelling = []
        self._guarded(lambda: self._receive(self._turns[:2]))

    def finish(self) -> None:
        """Land all rounds. Raises as `PendingOps.wait` does."""
        self._guarded(self._land)

    def _land(self) -> None:
        for number, turn in enumerate(self._turns):
            self._travelling.pop(0).wait()
            turn.copies.run()
            self._receive(self._turns[number + 2 : number + 3])  # into the bucket that was just landed

    def _receive(self, turns: Sequence[_Round]) -> None:
        for turn in turns:
            assert self._peers is not None  # who has turns has peers
            self._travelling.append(self._peers.receive(turn.parcels))

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BaseException:
            self._travelling = []
            if self._peers is not None:
                self._peers.close()
            raise


@dataclass(frozen=True, slots=True)
class _Link:
    """One link as one side has it.

    dtypes  of each item, as it travels
    views   of each item in this side's own memory; several where it lands several times
    """

    messages: list[Message]
    dtypes: list[torch.dtype]
    views: Sequence[tuple[torch.Tensor, ...]]
    payload_bytes: int

    @classmethod
    def cut(
        cls, layout: SourceLayout, order: SendRequest, share_bytes: int, views: Sequence[tuple[torch.Tensor, ...]]
    ) -> _Link:
        items = order.items(layout)
        dtypes = [getattr(torch, layout.tensors[tensor].dtype) for tensor, _ in order.rows()]
        return cls(messages(items, share_bytes), dtypes, views, sum(item.nbytes for item in items))

    def own(self, slot: BufferSlice) -> list[torch.Tensor]:
        """This side's memory of a slot."""
        views = self.views[slot.item]
        return list(views) if slot.box is None else [view[slot.box.slices()] for view in views]

    def in_place(self, message: Message, device: torch.device) -> torch.Tensor | None:
        """The bytes of a message, where this side has them in one piece; else None."""
        if len(message.slots) > 1:
            return None
        own, *others = self.own(message.slots[0])
        alike = own.dtype == self.dtypes[message.slots[0].item] and own.device.type == device.type
        if others or not alike or not own.is_contiguous():
            return None
        return own.as_strided((own.numel(),), (1,)).view(torch.uint8)

    def staged_bytes(self, in_place: Sequence[torch.Tensor | None]) -> int:
        """Of a bucket, what this link takes for the messages that this side has not in place."""
        staged = (m.nbytes for m, own in zip(self.messages, in_place, strict=True) if own is None)
        return -(-max(staged, default=0) // ALIGN_BYTES) * ALIGN_BYTES


class LinkLoad(NamedTuple):
    """What one link asks of one side in an update. staged_bytes: of each bucket."""

    messages: int
    payload_bytes: int
    staged_bytes: int


def load_of(
    layout: SourceLayout,
    order: SendRequest,
    share_bytes: int,
    views: Sequence[tuple[torch.Tensor, ...]],
    device: torch.device,
) -> LinkLoad:
    """The load that a link would be, told without making a bucket. For `views` see `_Link`; meta tensors will do."""
    link = _Link.cut(layout, order, share_bytes, views)
    staged = link.staged_bytes([link.in_place(message, device) for message in link.messages])
    return LinkLoad(len(link.messages), link.payload_bytes, staged)


def buckets_bytes(loads: Iterable[LinkLoad]) -> int:
    """Bytes of the buckets of a side whose links are these."""
    of_links = list(loads)
    rounds = max((load.messages for load in of_links), default=0)
    return min(_BUCKETS, rounds) * sum(load.staged_bytes for load in of_links)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of all links: the messages, and the copies between this side's memory and the bucket."""

    parcels: list[PeerBuffer]
    copies: CopyList


def _turns(links: Mapping[int, _Link], device: torch.device, *, pack: bool) -> tuple[list[_Round], int]:
    """The rounds, and the bytes of their buckets. `pack`: copies go into the bucket, not out of it."""
    in_place = {peer: [link.in_place(m, device) for m in link.messages] for peer, link in links.items()}
    begin, end = {}, 0  # each link's region of a bucket
    for peer, link in links.items():
        begin[peer] = end
        end += link.staged_bytes(in_place[peer])
    rounds = max((len(link.messages) for link in links.values()), default=0)
    buckets = [torch.empty(end, dtype=torch.uint8, device=device) for _ in range(min(_BUCKETS, rounds))]
    turns = []
    for number in range(rounds):
        bucket = buckets[number % 2]
        turn = _Round([], CopyList())
        for peer in sorted(links):
            link = links[peer]
            if number >= len(link.messages):
                continue
            message, own = link.messages[number], in_place[peer][number]
            buffer = bucket[begin[peer] : begin[peer] + message.nbytes] if own is None else own
            turn.parcels.append((peer, buffer))
            for slot in message.slots if own is None else ():
                for view in link.own(slot):
                    dtype = link.dtypes[slot.item]
                    stop = slot.offset + view.numel() * dtype.itemsize
                    boxed = buffer[slot.offset : stop].view(dtype).view(view.shape)
                    turn.copies.add(*((boxed, view) if pack else (view, boxed)))
        turns.append(turn)
    return turns, sum(bucket.numel() for bucket in buckets)
