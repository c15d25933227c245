"""Cuts the reads of an engine rank into messages: from another rank's registered memory, or from files.

A message's descriptors are chosen by `routes.runs`. Nobody but the reader has to agree to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import ALIGN_BYTES, LocalRegion, aligned
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.routes.nixl.remote_shards import RemoteShard
from sglang_reshard.routes.p2p.links import P2pLink
from sglang_reshard.routes.p2p.messages import BufferSlice, SendRequest
from sglang_reshard.routes.runs import Runs, plan_runs

# What a descriptor costs, in bytes read: 5 to 15 microseconds at 0.3 GB/s (TCP) to 3 GB/s (shared memory) on 2 cores.
DESCRIPTOR_BYTES = 8 * 1024
_MAX_RATIO = 8.0  # how many times a region's bytes are read at most


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """A slice of a message, of `count` elements.

    runs, shard, address  the runs to read, their shard, and its address
    offset                where it lies in the message's buffer, in bytes
    """

    slice: BufferSlice
    count: tuple[int, ...]
    runs: Runs
    shard: RemoteShard
    address: int
    offset: int


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """The reads from one rank at once, into `in_place` if there is such memory, else into a bucket."""

    parts: list[ReadSlice]
    nbytes: int
    in_place: torch.Tensor | None

    def descriptors(self) -> dict[tuple[str, int], list[np.ndarray]]:
        """Returns remote addresses, offsets in the buffer and bytes of all runs, by kind of memory and GPU."""
        found: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for part in self.parts:
            runs = len(part.runs.offsets)
            remote = part.address + part.runs.offsets
            local = part.offset + np.arange(runs) * part.runs.nbytes
            columns = remote, local, np.full(runs, part.runs.nbytes)
            found.setdefault((part.shard.kind, part.shard.gpu), []).append(columns)
        return {key: [np.concatenate(column) for column in zip(*parts, strict=True)] for key, parts in found.items()}


@dataclass(frozen=True, slots=True)
class ReadLink:
    """All that an engine rank reads from one rank."""

    link: P2pLink
    messages: list[ReadMessage]
    tensor_of: list[int]  # of each item of the request

    @property
    def bucket_bytes(self) -> int:
        """Bytes of this link's part of a bucket."""
        return max((message.nbytes for message in self.messages), default=0)

    @property
    def tensors(self) -> list[list[int]]:
        """The layout's tensor numbers in each message."""
        return [[self.tensor_of[part.slice.item] for part in message.parts] for message in self.messages]

    @property
    def payload_bytes(self) -> list[int]:
        """Bytes of each message that the engine rank needs."""
        return [
            sum(math.prod(part.count) * self.link.dtypes[part.slice.item].itemsize for part in message.parts)
            for message in self.messages
        ]

    @property
    def read_bytes(self) -> int:
        """Bytes that are read in one update, gaps included."""
        return sum(part.runs.total_bytes for message in self.messages for part in message.parts)

    @classmethod
    def cut(
        cls,
        source: str,
        layout: SourceLayout,
        request: SendRequest,
        shard_of: Callable[[int], RemoteShard],
        views: Sequence[tuple[torch.Tensor, ...]],
        round_bytes: int,
        device: torch.device | None,
        descriptor_bytes: int = DESCRIPTOR_BYTES,
    ) -> ReadLink:
        """Cuts what an engine rank on `device` reads into messages of at most `round_bytes`, gaps included.

        source            names the rank that is read, in errors
        shard_of          its shard of the layout's tensor number
        views             of live memory, for each item of the request
        device            None reads nothing in place
        descriptor_bytes  see `plan_runs`; 0 reads no gaps
        """
        entries, items = list(request.entries()), request.items(layout)
        memory = [_memory(source, shard_of(tensor), tensor, region) for tensor, region in entries]
        ratio = 1.0
        for (_, region), (_, strides), item in zip(entries, memory, items, strict=True):
            runs = plan_runs(region.count, strides, item.item_bytes, descriptor_bytes, _MAX_RATIO)
            ratio = max(ratio, runs.total_bytes / item.nbytes)
        # Gaps that are read take room in the bucket, too.
        message_bytes = max(ALIGN_BYTES, int(round_bytes / ratio) // ALIGN_BYTES * ALIGN_BYTES)
        link = P2pLink.cut(layout, request, message_bytes, views)
        messages = []
        for message in link.messages:
            parts, end = [], 0
            for piece in message.slices:
                (tensor, region), (offset, strides) = entries[piece.item], memory[piece.item]
                item_bytes = items[piece.item].item_bytes
                count = region.count if piece.box is None else piece.box.shape
                if piece.box is not None:
                    offset += sum(a * s for a, s in zip(piece.box.start, strides, strict=True))
                runs = plan_runs(count, strides, item_bytes, descriptor_bytes, ratio)
                shard = shard_of(tensor)
                parts.append(ReadSlice(piece, count, runs, shard, shard.address + offset * item_bytes, end))
                end = aligned(end + runs.total_bytes)
            in_place = None if device is None else link.in_place(message, device)
            if in_place is not None and not parts[0].runs.is_row_major(parts[0].count):
                in_place = None  # gaps would overwrite other parameters
            messages.append(ReadMessage(parts, 0 if in_place is not None else end, in_place))
        return cls(link, messages, [tensor for tensor, _ in entries])

    def add_copies(self, copies: CopyList, part: ReadSlice, buffer: torch.Tensor) -> None:
        """Adds the copies of a part from the buffer that it was read into to where it belongs."""
        dtype = self.link.dtypes[part.slice.item]
        data = buffer[part.offset : part.offset + part.runs.total_bytes].view(dtype)
        for view in self.link.own_views(part.slice):
            copies.add(view, data.as_strided(view.shape, part.runs.strides, data.storage_offset()))


def _memory(source: str, shard: RemoteShard, tensor: int, region: LocalRegion) -> tuple[int, tuple[int, ...]]:
    """Returns first element and strides of a region in a rank's shard, in elements."""
    if not region.is_flat and len(shard.strides) != len(region.start):
        raise Mismatch(
            f"{source} announced {len(shard.strides)} strides for the shard of tensor number {tensor}, which has "
            f"{len(region.start)} dimensions. This is a bug; please report it"
        )
    return region.memory(shard.strides)
