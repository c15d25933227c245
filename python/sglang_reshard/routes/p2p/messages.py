"""Plans point-to-point transfers: the regions that trainer ranks send to engine ranks, in messages of bounded size.

Sender and receiver cut the stream between them into the same messages by themselves, from the same `SendRequest` and
the same bytes per round, and exchange no further metadata. Streams progress in rounds of one message per peer, which
may be sent in parts: a rank packs or unpacks all messages of a round at once, and together they fit one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from sglang_reshard.layout.regions import ALIGN_BYTES, ITEM_BYTES, Box, LocalRegion, aligned, split
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan.read_plan import ReadPlan

_MIN_MESSAGE_BYTES = 64 * 1024  # unless the bucket has no room for it


class SendItem(NamedTuple):
    """A region that is sent: its elements along each dimension, and the bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class BufferSlice(NamedTuple):
    """A box of item number `item` (None: all of it) at `offset` bytes of its message, row-major."""

    item: int
    box: Box | None
    offset: int
    nbytes: int


class Message(NamedTuple):
    """The message of one rank to one peer in one round."""

    slices: tuple[BufferSlice, ...]
    nbytes: int


class SendRequest(msgspec.Struct, frozen=True):
    """Lists the reads that one engine rank requests from one trainer rank, in the order in which it unpacks them.

    regions                 of local tensors
    tensor_ids, region_ids  a number per item, int32 little-endian: the layout's tensor, and the region
    dtypes, dtype_ids       of the sent items, and a number per item, uint8; by default the tensors' own
    delta                   this engine rank can apply deltas of them
    """

    regions: tuple[LocalRegion, ...]
    tensor_ids: bytes
    region_ids: bytes
    dtypes: tuple[str, ...] = ()
    dtype_ids: bytes = b""
    delta: bool = False

    def entries(self) -> Iterable[tuple[int, LocalRegion]]:
        """Yields (tensor number, region of the local tensor) per item."""
        tensors, regions = (np.frombuffer(column, "<i4").tolist() for column in (self.tensor_ids, self.region_ids))
        return ((tensor, self.regions[number]) for tensor, number in zip(tensors, regions, strict=True))

    def item_dtypes(self, layout: SourceLayout) -> list[str]:
        """Returns the name of each item's dtype in the message."""
        if self.dtypes:
            return [self.dtypes[number] for number in self.dtype_ids]
        return [layout.tensors[tensor].dtype for tensor in np.frombuffer(self.tensor_ids, "<i4").tolist()]

    def items(self, layout: SourceLayout) -> list[SendItem]:
        dtypes = self.item_dtypes(layout)
        return [SendItem(e.count, ITEM_BYTES[dtype]) for (_, e), dtype in zip(self.entries(), dtypes, strict=True)]


def send_request(plan: ReadPlan, trainer_rank: int, dtypes: Iterable[str] = (), *, delta: bool = False) -> SendRequest:
    """Returns an engine rank's request to a trainer rank. Its items are the plan's `sent_reads`.

    dtypes  of the sent items; by default the tensors' own
    """
    reads = sent_reads(plan, trainer_rank)
    names: dict[str, int] = {}
    dtype_ids = bytes(names.setdefault(dtype, len(names)) for dtype in dtypes)
    used, of_read = np.unique(plan.item_ids[reads], return_inverse=True)
    numbers: dict[LocalRegion, int] = {}
    of_item = np.array([numbers.setdefault(plan.items[i].local_region, len(numbers)) for i in used.tolist()], "<i4")
    tensor_ids = plan.tensor_ids[plan.copy_ids[reads]].astype("<i4")
    region_ids = of_item[of_read].astype("<i4").tobytes()
    return SendRequest(tuple(numbers), tensor_ids.tobytes(), region_ids, tuple(names), dtype_ids, delta)


def sent_reads(plan: ReadPlan, trainer_rank: int) -> np.ndarray:
    """Returns the reads for which a trainer rank sends a message: those from it that are not duplicates."""
    own = plan.reads_from(trainer_rank)
    reads = np.arange(own.start, own.stop)
    return reads[~np.isin(reads, list(plan.duplicates))] if plan.duplicates else reads


def round_bytes(nbytes: np.ndarray, bucket_bytes: int) -> np.ndarray:
    """Returns the bytes that each trainer rank sends each engine rank per round, [trainer ranks, engine ranks].

    nbytes  what each sends each in total, of the same shape

    All streams are spread over the same number of rounds, so that they finish together and none waits for another;
    small ones are not cut below a minimum size. A rank sends or receives at most `bucket_bytes` per round. Entries are
    multiples of ALIGN_BYTES, which is more than any element; their sum exceeds the bucket only if it has no room for
    ALIGN_BYTES for every peer.
    """
    used = nbytes > 0
    whole = aligned(nbytes)
    busiest = max((int(used.sum(axis=axis).max(initial=0)) for axis in (0, 1)), default=0)
    room = max(ALIGN_BYTES, bucket_bytes // max(1, 2 * busiest) // ALIGN_BYTES * ALIGN_BYTES)
    least = min(_MIN_MESSAGE_BYTES, room)

    def in_rounds(rounds: int) -> np.ndarray:
        return np.where(used, np.minimum(whole, np.maximum(least, aligned(-(-nbytes // rounds)))), 0)

    def fits(found: np.ndarray) -> bool:
        return all(int(found.sum(axis=axis).max(initial=0)) <= bucket_bytes for axis in (0, 1))

    few, many = 1, max(1, int(nbytes.max(initial=0)))  # in `many` rounds every message has the minimum size
    while few < many:
        rounds = (few + many) // 2
        few, many = (few, rounds) if fits(in_rounds(rounds)) else (rounds + 1, many)
    return in_rounds(few)


def cut_messages(items: Iterable[SendItem], message_bytes: int) -> list[Message]:
    """Cuts a stream into messages: every element once, in order, each slice at a multiple of ALIGN_BYTES.

    A message has at most `message_bytes`, and at least one element. Larger items are cut into boxes that are
    contiguous in the item's row-major order.
    """
    found: list[Message] = []
    slices: list[BufferSlice] = []
    end = 0
    cuts: dict[SendItem, list[tuple[Box | None, int]]] = {}  # most items are equal to many others
    for number, item in enumerate(items):
        boxes = cuts.get(item)
        if boxes is None:
            boxes = cuts[item] = _cut(item, message_bytes)
        for box, nbytes in boxes:
            offset = aligned(end)
            if slices and offset + nbytes > message_bytes:
                found.append(Message(tuple(slices), end))
                slices, offset = [], 0
            slices.append(BufferSlice(number, box, offset, nbytes))
            end = offset + nbytes
    if slices:
        found.append(Message(tuple(slices), end))
    return found


def take_apart(message: Message, least_bytes: int) -> list[Message]:
    """Returns the messages that are sent instead of one: its small slices, together, and then each of the others.

    least_bytes  of a slice that is a message by itself
    """
    large = [part for part in message.slices if part.nbytes >= least_bytes]
    if not large or len(message.slices) == 1:
        return [message]
    small: list[BufferSlice] = []
    end = 0
    for part in message.slices:
        if part.nbytes < least_bytes:
            offset = aligned(end)
            small.append(part._replace(offset=offset))
            end = offset + part.nbytes
    packed = [Message(tuple(small), end)] if small else []
    return packed + [Message((part._replace(offset=0),), part.nbytes) for part in large]


def _cut(item: SendItem, message_bytes: int) -> list[tuple[Box | None, int]]:
    """Returns (box, bytes) of each message that the item needs by itself; None for all of it."""
    if item.nbytes <= message_bytes:
        return [(None, item.nbytes)]
    boxes = split(Box.whole(item.shape), max(1, message_bytes // item.item_bytes))
    return [(box, box.numel * item.item_bytes) for box in boxes]
