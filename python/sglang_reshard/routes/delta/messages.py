"""The messages of one link in the memory of one side, one at a time: in place, or in a bucket that they share.

A section is a link's encoded messages:

    table    how each message is encoded, int64 [messages, 2]: kind, and number of units that have changed
    indexes  one after the other, in as much room as a bit for each unit takes
    values   one after the other

Indexes are sent and checked before the first value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Mismatch
from sglang_reshard.routes.delta.base_checksum import message_checksum, row_count
from sglang_reshard.routes.delta.checks import read_encodings
from sglang_reshard.routes.delta.encoding import UNITS, Encoded, index_room
from sglang_reshard.routes.p2p.links import P2pLink


class _Message(NamedTuple):
    """The memory of a message, and the copies that bring it there and back; none if it is in place.

    gaps  between its slices, in the bucket
    """

    buffer: torch.Tensor
    pack: CopyList | None
    unpack: CopyList | None
    gaps: bool


class LinkMessages:
    """All messages of a link, which both sides have cut alike.

    nbytes        of each
    unit_bytes    of the integers as which they are compared
    units         of each
    table_bytes   of the table at the beginning of a section
    values_begin  offset of the values in a section
    """

    def __init__(self, link: P2pLink, device: torch.device, bucket: torch.Tensor, *, written: bool) -> None:
        """`bucket` has room for `packed_bytes(link.rounds(device))`. `written`: as messages are unpacked, too."""
        self.nbytes = [message.nbytes for message in link.messages]
        self.unit_bytes = min([max(UNITS), *(dtype.itemsize for dtype in link.dtypes)])
        self.units = [nbytes // self.unit_bytes for nbytes in self.nbytes]
        self.table_bytes = 16 * len(self.nbytes)
        self.values_begin = self.table_bytes + sum(map(index_room, self.units))
        self._first_rows = list(itertools.accumulate(map(row_count, self.nbytes), initial=0))
        self._messages = []
        for ((message, buffer),) in link.rounds(device):
            if buffer is not None:
                self._messages.append(_Message(buffer, None, None, gaps=False))
                continue
            buffer = bucket[: message.nbytes]
            pack, unpack = CopyList(), CopyList()
            link.add_copies(pack, message, buffer, pack=True)
            pack.build()
            if written:
                link.add_copies(unpack, message, buffer, pack=False)
                unpack.build()
            payload = sum(part.nbytes for part in message.slices)
            self._messages.append(_Message(buffer, pack, unpack, gaps=payload != message.nbytes))

    def __len__(self) -> int:
        return len(self.nbytes)

    def read(self, number: int) -> torch.Tensor:
        """Returns a message's bytes as they are now, valid until the next one is read; zeros between its slices."""
        message = self._messages[number]
        if message.pack is not None:
            if message.gaps:
                message.buffer.zero_()
            message.pack.run()
        return message.buffer

    def write(self, number: int) -> None:
        """Writes back the message that was read last, unless it is in place."""
        if (unpack := self._messages[number].unpack) is not None:
            unpack.run()

    def checksum(self, number: int, message: torch.Tensor) -> int:
        """Returns the part of a message, as it was read, in the checksum of all."""
        return message_checksum(message, self._first_rows[number])


class Piece(NamedTuple):
    """Bytes of a section that are sent together: `nbytes` from `offset` of it. `messages`: whose values they are."""

    offset: int
    nbytes: int
    messages: range = range(0)


class Encodings:
    """The encodings of all messages of a link.

    encoded      of each message
    index_bytes  of each
    value_bytes  of each
    nbytes       of the section, without the room that its indexes do not take
    """

    def __init__(self, messages: LinkMessages, encoded: Sequence[Encoded]) -> None:
        self._messages, self.encoded = messages, encoded
        self.index_bytes = [e.index_bytes(n) for e, n in zip(encoded, messages.units, strict=True)]
        self.value_bytes = [e.value_bytes(n, messages.unit_bytes) for e, n in zip(encoded, messages.units, strict=True)]
        self.nbytes = messages.table_bytes + sum(self.index_bytes) + sum(self.value_bytes)

    @classmethod
    def read(
        cls, table: torch.Tensor, messages: LinkMessages, nbytes: int, damaged: Callable[[int, str], Mismatch]
    ) -> Encodings:
        """Reads a table. Every field is checked before any data that it describes is in memory.

        table    bytes
        nbytes   of the section, as it was announced
        damaged  returns the error for a message of this number, with the given fault

        Raises that error unless the table fits the messages, and `nbytes`.
        """
        rows = np.frombuffer(table.cpu().numpy().tobytes(), "<i8").reshape(-1, 2)
        found = cls(messages, read_encodings(rows, messages.units, damaged))
        if found.nbytes != nbytes:
            raise damaged(0, f"its table describes {found.nbytes:,} bytes, but {nbytes:,} were announced")
        return found

    def table(self, device: torch.device) -> torch.Tensor:
        """Returns the table as bytes."""
        return torch.tensor(self.encoded, dtype=torch.int64).view(-1).view(torch.uint8).to(device)

    def index_pieces(self, round_bytes: int) -> list[Piece]:
        """Cuts all indexes, one after the other, as both sides do."""
        begin = self._messages.table_bytes
        end = begin + sum(self.index_bytes)
        return [Piece(at, min(round_bytes, end - at)) for at in range(begin, end, round_bytes)]

    def value_pieces(self, round_bytes: int) -> list[Piece]:
        """Cuts the values between messages, as both sides do. None is larger than `round_bytes`, as no message is."""
        return cut_between(self.value_bytes, self._messages.values_begin, round_bytes)


def cut_between(sizes: Sequence[int], begin: int, most: int) -> list[Piece]:
    """Returns pieces of at most `most` bytes, or of one message that has more; `sizes` are those of the messages."""
    pieces, first, nbytes = [], 0, 0
    for number, size in enumerate(sizes):
        if nbytes and nbytes + size > most:
            pieces.append(Piece(begin, nbytes, range(first, number)))
            begin, first, nbytes = begin + nbytes, number, 0
        nbytes += size
    if nbytes:
        pieces.append(Piece(begin, nbytes, range(first, len(sizes))))
    return pieces
