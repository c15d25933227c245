"""Reads an engine rank's weights from other ranks' registered memory, each rank's part as a stream of messages.

Each stream alternates between two buckets; a message that is one contiguous box of a parameter is read in place. A
read's descriptors are prepared once, and started again in every update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.landings.base import Landing
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import ReadPlan
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.nixl.agent import memory_kind
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.remote_shards import trainer_name
from sglang_reshard.routes.p2p.links import destination_views, targets_by_round
from sglang_reshard.routes.p2p.messages import send_request
from sglang_reshard.routes.read_link import ReadLink, ReadMessage
from sglang_reshard.routes.wire.rounds import BUCKETS

_SPINS = 100  # polls without a pause: most reads of a small model have ended by then
_POLL_S = 1e-4


class Stream:
    """Reads an engine rank's weights from one rank, message by message.

    peer           its name in the reader
    is_done        whether all has arrived in this update
    count          number of messages
    started        number of those whose reads have been started
    finished       number of those that have arrived
    tensors        the layout's tensor numbers in each message
    payload_bytes  of each message
    read_bytes     that are read in one update, gaps included
    """

    def __init__(
        self,
        reader: NixlReader,
        peer: str,
        link: ReadLink,
        device: torch.device,
        landing: Landing | None = None,
    ) -> None:
        """The next message also waits for the other ranks, if it is converted in `landing`."""
        self.peer, self.landing = peer, landing
        self.finished, self.started, self.is_done = 0, 0, False
        self.tensors, self.payload_bytes, self.read_bytes = link.tensors, link.payload_bytes, link.read_bytes
        self.reader, self._device = reader, device
        count = min(BUCKETS, len(link.messages))
        buckets = [torch.empty(link.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        in_place = [m.in_place.untyped_storage() for m in link.messages if m.in_place is not None]
        reader.register([*(bucket.untyped_storage() for bucket in buckets), *in_place])
        self.count = len(link.messages)
        self._messages = [self._prepare(link, m, buckets[n % BUCKETS]) for n, m in enumerate(link.messages)]
        self.extra_bytes = sum(b.numel() for b in buckets) + sum(c.table_bytes for _, c in self._messages if c)

    def begin(self, update: int) -> None:
        """Nothing has arrived yet in this update."""
        self.finished, self.started, self.is_done = 0, 0, False

    def advance(self) -> bool:
        """Ends reads that have arrived, and starts as many as fit; returns whether there were any.

        Raises PeerDisconnected if a read fails.
        """
        finished, started = self.finished, self.started
        while self.finished < self.started:
            reads, copies = self._messages[self.finished]
            if not self.reader.are_done(self.peer, reads):
                break
            if copies is not None:
                copies.run()
                runtime().synchronize([self._device])  # the bucket is overwritten in no stream's order
            self.finished += 1
        turns = self.finished if self.landing is None else min(self.finished, self.landing.finished)
        while self.started < min(len(self._messages), turns + BUCKETS) and self.may_start(self.started):
            self.reader.start(self.peer, self._messages[self.started][0])
            self.started += 1
        self.is_done = self.finished == len(self._messages) and self.confirm()
        return self.is_done or (finished, started) != (self.finished, self.started)

    def may_start(self, number: int) -> bool:
        """Returns whether what a message brings can be read already."""
        return True

    def confirm(self) -> bool:
        """Returns whether all arrived data are valid."""
        return True

    def _prepare(self, link: ReadLink, message: ReadMessage, bucket: torch.Tensor) -> tuple[list[Any], CopyList | None]:
        """Returns a message's reads, one for each kind of the peer's memory, and copies out of the bucket, if any."""
        copies, buffer = None, message.in_place
        if buffer is None:
            copies, buffer = CopyList(), bucket
            for part in message.parts:
                link.add_copies(copies, part, buffer)
            copies.build()
        kind, gpu = memory_kind(self._device)
        reads = []
        for (remote_kind, remote_gpu), (remote, local, nbytes) in message.descriptors().items():
            rows = np.column_stack([remote, nbytes, np.full(len(remote), remote_gpu)])
            own = np.column_stack([local + buffer.data_ptr(), nbytes, np.full(len(local), gpu)])
            reads.append(self.reader.prepare(self.peer, (remote_kind, rows), (kind, own)))
        return reads, copies


def trainer_streams(reader: NixlReader, reads: Reads, plan: ReadPlan, sizes: Mapping[int, int]) -> dict[int, Stream]:
    """Returns trainer rank -> the stream of the reads of `plan` from it, in messages of `sizes` bytes.

    Places the landing.
    """
    layout, landing = reads.tensor_index.layout, reads.landing

    def links() -> dict[int, ReadLink]:
        return {t: cut_link(reader, trainer_name(t), reads, layout, plan, t, sizes[t]) for t in plan.traffic()}

    if not reads.program.arrivals:
        return {t: Stream(reader, trainer_name(t), link, reads.device) for t, link in links().items()}
    rounds = targets_by_round({rank: link.link for rank, link in links().items()}, plan)
    landing.place(rounds, (), ahead=BUCKETS - 1)
    return {t: Stream(reader, trainer_name(t), link, reads.device, landing) for t, link in links().items()}


def cut_link(
    reader: NixlReader, peer: str, reads: Reads, layout: SourceLayout, plan: ReadPlan, rank: int, message_bytes: int
) -> ReadLink:
    """Returns what `plan` reads from `rank`, which is `peer` in the reader and holds `layout`, cut into messages."""
    return ReadLink.cut(
        peer,
        layout,
        send_request(plan, rank),
        lambda tensor: reader.shard(peer, tensor),
        destination_views(reads.program, plan, rank),
        message_bytes,
        reads.device,
    )


def read_streams(
    reads: Reads, streams: Sequence[Stream], advanced: Callable[[], None] = lambda: None, update: int = 0
) -> None:
    """Reads all streams to their ends. Calls `advanced` at the beginning, and whenever anything has arrived.

    update  that it is of, see `Stream.begin`

    Raises PeerDisconnected if a read fails, and DeadlineExceeded if none ends in `reads.timeout_s`.
    """
    left, polls, since, landing = list(streams), 0, time.monotonic(), reads.landing
    filling = [stream for stream in streams if stream.landing is not None]
    for stream in streams:
        stream.begin(update)
    advanced()
    while left:
        has_advanced = False
        for stream in left:
            has_advanced |= stream.advance()
        while (turn := landing.finished) < landing.turns:
            if any(stream.finished <= turn < stream.count for stream in filling):
                break
            landing.arrived(turn)  # all messages of the turn have
        if has_advanced:
            advanced()
            left = [stream for stream in left if not stream.is_done]
            polls, since = 0, time.monotonic()
            continue
        if time.monotonic() > since + reads.timeout_s:
            raise DeadlineExceeded(
                f"engine rank {reads.engine_rank} could not finish reading from "
                f"{', '.join(stream.peer for stream in left)} in time. Is that rank's process stopped, or its host "
                "unreachable?"
            )
        polls += 1
        time.sleep(0 if polls < _SPINS else _POLL_S)
