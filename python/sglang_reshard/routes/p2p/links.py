"""Cuts what one trainer rank sends to one engine rank into messages, and places these in buckets.

Both ends cut each link's stream into the same messages (`messages`), one per round. A message that is one contiguous
box on a side needs no bucket there: it is sent from the shard, or received into the live parameter, in place. Host
memory is copied by the cores that drive gloo's sockets, too, so that there every large box is a message by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.layout.regions import ITEM_BYTES, aligned
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import ReadPlan
from sglang_reshard.routes.ipc import read_targets
from sglang_reshard.routes.p2p.messages import (
    BufferSlice,
    Message,
    SendRequest,
    cut_messages,
    send_request,
    sent_reads,
    take_apart,
)
from sglang_reshard.routes.wire.communicator import PeerBuffer
from sglang_reshard.routes.wire.rounds import BUCKETS

if TYPE_CHECKING:
    from sglang_reshard.routes.base import Reads
    from sglang_reshard.trace.program import Program

# From here on a message of gloo's costs less than the two copies that it saves: docs/results/p2p-rate.md.
IN_PLACE_BYTES = 512 << 10
Round = tuple[list[PeerBuffer], CopyList]  # the messages of all links, and the copies into or out of the bucket
LinkRound = list[tuple[Message, torch.Tensor | None]]  # messages, and their bytes where this side has them `in_place`


def sent_link(layout: SourceLayout, shards: Sequence[torch.Tensor], request: SendRequest, round_bytes: int) -> P2pLink:
    """Returns a trainer rank's link to an engine rank. `shards` are this rank's, in the layout's order."""
    views = [(region.view(shards[tensor]).detach(),) for tensor, region in request.entries()]
    return P2pLink.cut(layout, request, round_bytes, views)


def engine_links(
    reads: Reads, round_bytes: Mapping[int, int], *, live: Program | None = None, as_kept: bool = False
) -> dict[int, P2pLink]:
    """Returns an engine rank's links to the trainer ranks that send `round_bytes` to it per round.

    live     what writes the views; by default the program of `reads`
    as_kept  items are sent in the dtypes of the kept weights, see `kept_dtypes`
    """
    layout, plan, links = reads.tensor_index.layout, reads.read_plan, {}
    program = reads.program if live is None else live
    for trainer_rank, nbytes in round_bytes.items():
        dtypes = kept_dtypes(layout, plan, program, trainer_rank) if as_kept else ()
        request = send_request(plan, trainer_rank, dtypes)
        links[trainer_rank] = P2pLink.cut(layout, request, nbytes, destination_views(program, plan, trainer_rank))
    return links


def targets_by_round(links: Mapping[int, P2pLink], plan: ReadPlan) -> list[set[str]]:
    """Returns the names of the storages that the messages of each round are copied to."""
    found: list[set[str]] = [set() for _ in range(max((len(link.messages) for link in links.values()), default=0))]
    for trainer_rank, link in links.items():
        reads_of_items = destination_reads(plan, trainer_rank)
        for targets, message in zip(found, link.messages, strict=False):
            targets |= read_targets(plan, {read for part in message.slices for read in reads_of_items[part.item]})
    return found


def destination_reads(plan: ReadPlan, trainer_rank: int) -> list[tuple[int, ...]]:
    """Returns, for each item that a trainer rank sends, the reads of the plan that it serves."""
    duplicates: dict[int, list[int]] = {}
    for read, first in plan.duplicates.items():
        duplicates.setdefault(first, []).append(read)
    return [(read, *duplicates.get(read, ())) for read in sent_reads(plan, trainer_rank).tolist()]


def kept_dtypes(layout: SourceLayout, plan: ReadPlan, program: Program, trainer_rank: int) -> list[str]:
    """Returns the dtype of each item that a trainer rank sends, as it is in live memory.

    It is the tensor's own if that is smaller, if the item is kept in several, or in one that no checkpoint has.
    """
    names = {name: str(target.dtype).removeprefix("torch.") for name, target in program.targets.items()}
    found = []
    for reads in destination_reads(plan, trainer_rank):
        own = layout.tensors[int(plan.tensor_ids[plan.copy_ids[reads[0]]])].dtype
        kept, *others = {names[plan.copies[int(plan.copy_ids[read])].target] for read in reads}
        smaller = not others and ITEM_BYTES.get(kept, math.inf) <= ITEM_BYTES[own]
        found.append(kept if smaller else own)
    return found


def destination_views(program: Program, plan: ReadPlan, trainer_rank: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns, for each item that a trainer rank sends, the views of live memory that it is copied to."""
    reads_of_items = destination_reads(plan, trainer_rank)
    return [tuple(destination_view(program, plan, read) for read in reads) for reads in reads_of_items]


def destination_view(program: Program, plan: ReadPlan, read: int) -> torch.Tensor:
    """Returns the view of live memory that a read of the plan is copied to."""
    copy, item, _ = plan.read(read)
    target = program.targets[copy.target]
    offset = target.storage_offset() + copy.offset + item.offset
    return target.as_strided(item.local_region.count, copy.strides, offset)


@dataclass(frozen=True, slots=True)
class P2pLink:
    """One trainer rank's stream to one engine rank, as one side has it.

    dtypes  of each item, as it is sent
    views   of each item in this side's own memory; several if it is copied to several destinations
    """

    messages: list[Message]
    dtypes: list[torch.dtype]
    views: Sequence[tuple[torch.Tensor, ...]]
    payload_bytes: int

    @classmethod
    def cut(
        cls, layout: SourceLayout, request: SendRequest, round_bytes: int, views: Sequence[tuple[torch.Tensor, ...]]
    ) -> P2pLink:
        """Cuts the link's stream into messages of at most `round_bytes`."""
        items = request.items(layout)
        dtypes = [getattr(torch, dtype) for dtype in request.item_dtypes(layout)]
        return cls(cut_messages(items, round_bytes), dtypes, views, sum(item.nbytes for item in items))

    def own_views(self, part: BufferSlice) -> list[torch.Tensor]:
        """Returns this side's memory of a slice of a message."""
        views = self.views[part.item]
        return list(views) if part.box is None else [view[part.box.slices()] for view in views]

    def in_place(self, message: Message, device: torch.device) -> torch.Tensor | None:
        """Returns the bytes of a message if this side has them contiguously in its own memory, else None."""
        if len(message.slices) > 1:
            return None
        own, *others = self.own_views(message.slices[0])
        alike = own.dtype == self.dtypes[message.slices[0].item] and own.device == device
        if others or not alike or not own.is_contiguous():
            return None
        return own.as_strided((own.numel(),), (1,)).view(torch.uint8)

    def add_copies(self, copies: CopyList, message: Message, buffer: torch.Tensor, *, pack: bool) -> None:
        """Adds the copies of a message's slices into its buffer, if `pack`, or out of it to where each belongs."""
        for part in message.slices:
            dtype = self.dtypes[part.item]
            for view in self.own_views(part)[: 1 if pack else None]:
                packed = buffer[part.offset : part.offset + part.nbytes].view(dtype).view(view.shape)
                copies.add(*((packed, view) if pack else (view, packed)))

    def rounds(self, device: torch.device, *, apart: bool = False) -> list[LinkRound]:
        """Returns the messages of each round: one, or with `apart` each of its large boxes and one of the others."""
        found = []
        for message in self.messages:
            parts = take_apart(message, IN_PLACE_BYTES) if apart else [message]
            found.append([(part, self.in_place(part, device)) for part in parts])
        return found


def packed_bytes(rounds: Sequence[LinkRound]) -> int:
    """Returns the bytes of a link's part of a bucket: space for items that a round does not send or receive in
    place.
    """
    return max((sum(aligned(m.nbytes) for m, own in messages if own is None) for messages in rounds), default=0)


def build_rounds(links: Mapping[int, P2pLink], device: torch.device, *, pack: bool) -> tuple[list[Round], int]:
    """Returns the rounds, and the bytes of buckets and tables. `pack`: copies go into the bucket, not out of it."""
    rounds_of = {peer: link.rounds(device, apart=device.type == "cpu") for peer, link in links.items()}
    begin, end = {}, 0  # of each link's part of a bucket
    for peer, of_link in rounds_of.items():
        begin[peer] = end
        end += packed_bytes(of_link)
    count = max(map(len, rounds_of.values()), default=0)
    buckets = [torch.empty(end, dtype=torch.uint8, device=device) for _ in range(min(BUCKETS, count))]
    rounds = []
    for number in range(count):
        bucket = buckets[number % BUCKETS]
        buffers: list[PeerBuffer] = []
        copies = CopyList()
        for peer, link in sorted(links.items(), key=lambda item: item[0]):
            offset = begin[peer]
            for message, buffer in rounds_of[peer][number] if number < len(rounds_of[peer]) else ():
                if buffer is None:
                    buffer = bucket[offset : offset + message.nbytes]
                    offset += aligned(message.nbytes)
                    link.add_copies(copies, message, buffer, pack=pack)
                buffers.append((peer, buffer))
        copies.build()
        rounds.append((buffers, copies))
    return rounds, sum(bucket.numel() for bucket in buckets) + sum(copies.table_bytes for _, copies in rounds)
