"""A trainer rank's side of deltas to one engine rank: keeps the weights it has sent, and encodes later changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.landings.checked.coefficients import MODULUS
from sglang_reshard.layout.regions import aligned
from sglang_reshard.routes.delta.checks import is_sound, verdicts
from sglang_reshard.routes.delta.encoding import Encoded, Kind, apply, encode
from sglang_reshard.routes.delta.messages import Encodings, LinkMessages, Piece
from sglang_reshard.routes.delta.offer import PART
from sglang_reshard.routes.nixl.source import allocate_readable
from sglang_reshard.routes.p2p.links import P2pLink, packed_bytes
from sglang_reshard.routes.wire.communicator import Communicators
from sglang_reshard.routes.wire.rounds import run_rounds

_ALIGN_BYTES = 64


class DeltaSource:
    """Keeps the weights that one trainer rank has sent to one engine rank, and the section that it could send next.

    section  the encoded messages, in memory that stays the same
    """

    def __init__(
        self,
        link: P2pLink,
        round_bytes: int,
        device: torch.device,
        base_device: torch.device | None,
        read_from: str = "",
    ) -> None:
        """`device`: where messages are packed and encoded; `base_device`: where the base is, by default there, too.

        read_from  names this rank, in warnings, if engine ranks read the section by NIXL
        """
        bucket = torch.empty(packed_bytes(link.rounds(device)), dtype=torch.uint8, device=device)
        self._messages = LinkMessages(link, device, bucket, written=False)
        self._device, self._base_device = device, base_device or device
        self._round_bytes = round_bytes
        self._begin = [0]
        for nbytes in self._messages.nbytes:
            self._begin.append(self._begin[-1] + aligned(nbytes, _ALIGN_BYTES))
        room = max(self._messages.values_begin, self._messages.table_bytes + self._begin[-1] // PART)
        self.section = (
            allocate_readable(room, device, read_from)
            if read_from
            else torch.empty(room, dtype=torch.uint8, device=device)
        )
        self._base: torch.Tensor | None = None
        self._checksums: list[int] = []  # of each message of the base
        self._next: list[int] = []  # of each message that was encoded last
        self._encoded: Encodings | None = None  # None if there is no base, or no room
        self._encoded_in = self._committed_in = 0  # numbers of updates

    @property
    def checksum(self) -> int:
        """Names the base."""
        return sum(self._checksums) % MODULUS

    @property
    def has_base(self) -> bool:
        """Returns whether anything has been sent."""
        return self._base is not None

    @property
    def message_bytes(self) -> int:
        """Returns the bytes of all messages."""
        return sum(self._messages.nbytes)

    def encode(self, update: int) -> bool:
        """Encodes what has changed since the base; returns whether there is one, and the section has room.

        Of several engines that are sent the same, only the first makes it work.
        """
        if self._encoded_in != update:
            self._encoded_in = update
            self._encoded = self._encode() if self._base is not None else None
        return self._encoded is not None

    def commit(self, update: int) -> None:
        """Makes the weights of `update`, which were sent, whole or not, the base. The shards must be as they were."""
        if self._committed_in == update:  # for another engine
            return
        self._committed_in = update
        if self._encoded_in == update and (encodings := self._encoded) is not None:
            messages, encoded = self._messages, encodings.encoded
            indexes = self._parts(messages.table_bytes, encodings.index_bytes)
            values = self._parts(messages.values_begin, encodings.value_bytes)
            if not all(verdicts(list(map(is_sound, encoded, messages.units, indexes)))):  # others can reach this memory
                raise Mismatch(
                    "the delta sent in the last update was modified in memory, so it cannot become the base; the next "
                    "update sends all weights. Only sglang-reshard may write to this memory"
                )
            for number, (how, index, changed) in enumerate(zip(encoded, indexes, values, strict=True)):
                own = index.to(self._base_device), changed.to(self._base_device)
                apply(how, *own, messages.unit_bytes, self._kept(number))
            self._checksums = self._next
        else:
            self._capture()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the last encoded messages."""
        return self._encoded.nbytes if self._encoded is not None else 0

    @property
    def indexes(self) -> list[torch.Tensor]:
        """The part that is sent first, in pieces that fit a round: the table, and the indexes."""
        assert self._encoded is not None, "encoded"
        return self._cut([Piece(0, self._messages.table_bytes), *self._encoded.index_pieces(self._round_bytes)])

    @property
    def values(self) -> list[torch.Tensor]:
        """The part that is sent second, in pieces that fit a round."""
        assert self._encoded is not None, "encoded"
        return self._cut(self._encoded.value_pieces(self._round_bytes))

    def _capture(self) -> None:
        if self._base is None:
            self._base = torch.zeros(self._begin[-1], dtype=torch.uint8, device=self._base_device)
        self._checksums = []
        with torch.inference_mode():
            for number in range(len(self._messages)):
                message = self._messages.read(number)
                self._checksums.append(self._messages.checksum(number, message))
                self._kept(number).copy_(message)

    def _encode(self) -> Encodings | None:
        messages, unit_bytes = self._messages, self._messages.unit_bytes
        index_end, values_end = messages.table_bytes, messages.values_begin
        found: list[Encoded] = []
        self._next = list(self._checksums)
        with torch.inference_mode():
            for number, units in enumerate(messages.units):
                new, base = messages.read(number), self._kept(number).to(self._device)
                index, values = self.section[index_end : messages.values_begin], self.section[values_end:]
                encoded = encode(new, base, unit_bytes, index, values)
                if encoded is None:
                    return None
                found.append(encoded)
                index_end += encoded.index_bytes(units)
                values_end += encoded.value_bytes(units, unit_bytes)
                if encoded.kind is not Kind.SAME:
                    self._next[number] = messages.checksum(number, new)
            encodings = Encodings(messages, found)
            self.section[: messages.table_bytes].copy_(encodings.table(self._device))
        runtime().synchronize_stream(self._device)  # it may be read in no stream's order
        return encodings

    def _kept(self, number: int) -> torch.Tensor:
        assert self._base is not None
        begin = self._begin[number]
        return self._base[begin : begin + self._messages.nbytes[number]]

    def _parts(self, begin: int, sizes: list[int]) -> Sequence[torch.Tensor]:
        return self.section[begin : begin + sum(sizes)].split(sizes)

    def _cut(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return [self.section[piece.offset : piece.offset + piece.nbytes] for piece in pieces]


def send_sections(sources: Mapping[int, DeltaSource], communicators: Communicators) -> None:
    """Sends the sections that were encoded last, by peer id, in rounds. Raises as `PendingOps.wait` does.

    No value is sent before all indexes: engine ranks wait for each other when they have these.
    """
    indexes = {peer: source.indexes for peer, source in sorted(sources.items())}
    values = {peer: source.values for peer, source in sorted(sources.items())}
    rounds = []
    for of_peers in (indexes, values):
        count = max(map(len, of_peers.values()), default=0)
        rounds += [[(peer, own[n]) for peer, own in of_peers.items() if n < len(own)] for n in range(count)]
    run_rounds(len(rounds), lambda number: communicators.send(rounds[number]).wait)
