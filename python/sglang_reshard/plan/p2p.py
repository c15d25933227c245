"""Boxes on their way from trainer ranks to the engine ranks that lack them: cut into messages of a bounded size.

Both ends of a link cut its stream by themselves, from the same `SendRequest` and the same share, and so agree
on every byte of every message without a word about it.

Links progress in rounds, one message a link: a rank packs or lands a round of all its links at once, and
their shares add up to one bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from sglang_reshard.layout.regions import Box, Region, split
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan.broadcast import ALIGN_BYTES
from sglang_reshard.plan.read_plan import ReadPlan

_CRUMB_BYTES = 64 * 1024  # what a message should not be smaller than, where the bucket has room


class SendItem(NamedTuple):
    """One strided box of a tensor, as it travels: elements along each dimension, bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class BufferSlice(NamedTuple):
    """A box of an item (indices within the item; None: all of it) at `offset` bytes of its message, row-major."""

    item: int
    box: Box | None
    offset: int


class Message(NamedTuple):
    """What travels over one link in one round."""

    slots: tuple[BufferSlice, ...]
    nbytes: int


class SendRequest(msgspec.Struct, frozen=True):
    """What one engine rank takes from one trainer rank, in the order in which it lands.

    regions            elements of local shards
    tensors, elements  a number for each item, int32 and little-endian: of the layout's tensor, and of the region
    """

    regions: tuple[Region, ...]
    tensors: bytes
    elements: bytes

    def rows(self) -> Iterable[tuple[int, Region]]:
        """(the layout's tensor, elements of the local shard) of each item."""
        tensors, elements = (np.frombuffer(column, "<i4").tolist() for column in (self.tensors, self.elements))
        return ((tensor, self.regions[number]) for tensor, number in zip(tensors, elements, strict=True))

    def items(self, layout: SourceLayout) -> list[SendItem]:
        used = np.unique(np.frombuffer(self.tensors, "<i4")).tolist()
        item_bytes = {tensor: layout.tensors[tensor].spec.item_bytes for tensor in used}
        return [SendItem(region.count, item_bytes[tensor]) for tensor, region in self.rows()]


def send_request(taken: ReadPlan, trainer_rank: int) -> SendRequest:
    """The order that an engine rank gives to a trainer rank. Its items are the `sent_rows`."""
    rows = sent_rows(taken, trainer_rank)
    used, of_row = np.unique(taken.part[rows], return_inverse=True)
    numbers: dict[Region, int] = {}
    of_part = np.array([numbers.setdefault(taken.parts[p].shard, len(numbers)) for p in used.tolist()], "<i4")
    tensors = taken.tensor[taken.copy[rows]].astype("<i4")
    return SendRequest(tuple(numbers), tensors.tobytes(), of_part[of_row].astype("<i4").tobytes())


def sent_rows(taken: ReadPlan, trainer_rank: int) -> np.ndarray:
    """The rows of an intake that a trainer rank sends: those whose elements no earlier row of its brings already."""
    own = taken.rows(trainer_rank)
    rows = np.arange(own.start, own.stop)
    return rows[~np.isin(rows, list(taken.repeats))] if taken.repeats else rows


def shares(link_bytes: np.ndarray, bucket_bytes: int) -> np.ndarray:
    """Bytes that each link may carry in one round, [trainer ranks, engine ranks]; 0 where it carries nothing.

    link_bytes  what each link carries in all, of the same shape

    A link's share is its bytes over one number of rounds, the same for all, so that all end together and
    none waits for another's bytes; small links are not cut into crumbs. The shares of a trainer rank add
    up to `bucket_bytes` at the most, and so do those of an engine rank. They are multiples of ALIGN_BYTES,
    which is more than any element takes; only where a bucket has no room for so much of every link of a
    rank does their sum exceed it.
    """
    used = link_bytes > 0
    whole = _aligned(link_bytes)
    busiest = max((int(used.sum(axis=axis).max(initial=0)) for axis in (0, 1)), default=0)
    crumb = min(_CRUMB_BYTES, max(ALIGN_BYTES, bucket_bytes // max(1, 2 * busiest) // ALIGN_BYTES * ALIGN_BYTES))

    def in_rounds(rounds: int) -> np.ndarray:
        return np.where(used, np.minimum(whole, np.maximum(crumb, _aligned(-(-link_bytes // rounds)))), 0)

    def fits(share: np.ndarray) -> bool:
        return all(int(share.sum(axis=axis).max(initial=0)) <= bucket_bytes for axis in (0, 1))

    few, many = 1, max(1, int(link_bytes.max(initial=0)))  # in `many` rounds every share is a crumb
    while few < many:
        rounds = (few + many) // 2
        few, many = (few, rounds) if fits(in_rounds(rounds)) else (rounds + 1, many)
    return in_rounds(few)


def messages(items: Iterable[SendItem], share_bytes: int) -> list[Message]:
    """A link's stream cut into messages: every element once, in order, each slot at a multiple of ALIGN_BYTES.

    A message has at most `share_bytes` (and at least one element). Items larger than that are split into
    parts that are contiguous in the item's row-major order.
    """
    found: list[Message] = []
    slots: list[BufferSlice] = []
    end = 0
    cuts: dict[SendItem, list[tuple[Box | None, int]]] = {}  # most items are like many others
    for number, item in enumerate(items):
        parts = cuts.get(item)
        if parts is None:
            parts = cuts[item] = _parts(item, share_bytes)
        for box, nbytes in parts:
            offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            if slots and offset + nbytes > share_bytes:
                found.append(Message(tuple(slots), end))
                slots, offset = [], 0
            slots.append(BufferSlice(number, box, offset))
            end = offset + nbytes
    if slots:
        found.append(Message(tuple(slots), end))
    return found


def _parts(item: SendItem, share_bytes: int) -> list[tuple[Box | None, int]]:
    """(box of the item or None for the whole, bytes)."""
    if item.nbytes <= share_bytes:
        return [(None, item.nbytes)]
    boxes = split(Box.whole(item.shape), max(1, share_bytes // item.item_bytes))
    return [(box, box.numel * item.item_bytes) for box in boxes]


def _aligned(nbytes: np.ndarray) -> np.ndarray:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
