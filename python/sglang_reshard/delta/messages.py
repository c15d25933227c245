"""The messages of one link in the memory of one side, one at a time: in place, or in a bucket that they share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.delta.checksum import message_checksum, rows_of
from sglang_reshard.delta.encoding import UNITS, Encoded, Kind, cut_pieces
from sglang_reshard.errors import Mismatch
from sglang_reshard.transports.copies import CopyList
from sglang_reshard.transports.p2p import P2pLink


class _Message(NamedTuple):
    """Where a message is, and the copies that bring it there and back; none if it is in place.

    gaps  between its slices, in the bucket
    """

    buffer: torch.Tensor
    pack: CopyList | None
    unpack: CopyList | None
    gaps: bool


class LinkMessages:
    """All messages of a link, which both sides have cut alike.

    nbytes      of each
    unit_bytes  of the integers as which they are compared
    """

    def __init__(self, link: P2pLink, device: torch.device, bucket: torch.Tensor, *, written: bool) -> None:
        """`bucket` has room for `packed_bytes(link.rounds(device))`. `written`: as messages are unpacked, too."""
        self.nbytes = [message.nbytes for message in link.messages]
        self.unit_bytes = min([max(UNITS), *(dtype.itemsize for dtype in link.dtypes)])
        rows = map(rows_of, self.nbytes)
        self._first_rows = [0, *itertools.accumulate(rows)]
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

    def units(self, number: int) -> int:
        """Returns the number of units of a message."""
        return self.nbytes[number] // self.unit_bytes

    def first_row(self, number: int) -> int:
        """Returns the number of the message's first row, see `delta.checksum`."""
        return self._first_rows[number]

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

    def checksum(self, number: int) -> int:
        """Returns a message's part of the checksum of all."""
        return message_checksum(self.read(number), self.first_row(number))


def table_bytes(messages: int) -> int:
    """Returns the bytes of the table at the beginning of a section."""
    return 8 * messages


def table(encoded: Sequence[Encoded], device: torch.device) -> torch.Tensor:
    """Returns the table as bytes: the kind of each message, and how many units have changed, int32."""
    return torch.tensor(encoded, dtype=torch.int32).view(-1).view(torch.uint8).to(device)


def read_table(data: torch.Tensor, messages: LinkMessages, nbytes: int, sender: str) -> list[Encoded]:
    """Returns how each message is encoded. Raises Mismatch, naming the sender, if it does not fit them, or `nbytes`."""
    rows = np.frombuffer(data.cpu().numpy().tobytes(), "<i4").reshape(-1, 2).tolist()
    found = [Encoded(Kind(kind), changed) for kind, changed in rows if 0 <= kind < len(Kind)]
    fits = len(found) == len(messages)
    fits = fits and all(0 <= encoded.changed <= messages.units(n) for n, encoded in enumerate(found))
    if not fits or table_bytes(len(found)) + sum(payload_sizes(found, messages)) != nbytes:
        raise Mismatch(f"{sender} sent deltas that do not fit its messages; this is a bug, please report it")
    return found


class Piece(NamedTuple):
    """Messages whose payloads are sent together: `nbytes` from `offset` of the section."""

    messages: range
    offset: int
    nbytes: int


def cut_section(encoded: Sequence[Encoded], messages: LinkMessages, round_bytes: int) -> list[Piece]:
    """Returns the pieces of a section after its table. None has more than `round_bytes`, of which one message has less.

    Both sides cut it alike.
    """
    sizes = payload_sizes(encoded, messages)
    end, found = table_bytes(len(messages)), []
    for run in cut_pieces(sizes, round_bytes):
        nbytes = sum(sizes[run.start : run.stop])
        found.append(Piece(run, end, nbytes))
        end += nbytes
    return found


def payload_sizes(encoded: Sequence[Encoded], messages: LinkMessages) -> list[int]:
    """Returns the bytes of each message's payload."""
    return [e.payload_bytes(messages.units(n), messages.unit_bytes) for n, e in enumerate(encoded)]
