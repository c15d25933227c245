"""A trainer rank's side of deltas to one engine rank: keeps what it has sent, and encodes what has changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sglang_reshard.delta.checksum import message_checksum
from sglang_reshard.delta.encoding import Encoded, Kind, apply, encode
from sglang_reshard.delta.messages import LinkMessages, cut_section, payload_sizes, table, table_bytes
from sglang_reshard.digest.coefficients import MODULUS
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.transports.communicator import P2pCommunicators, PendingRound
from sglang_reshard.transports.nixl_agent import memory_kind
from sglang_reshard.transports.p2p import BUCKETS, P2pLink, packed_bytes

_ALIGN_BYTES = 64
_PART = 2  # a section may have this part of the bytes of its messages: else everything is sent


class DeltaSource:
    """What one trainer rank has sent to one engine rank, and the section that it could send next.

    section  the encoded messages, in memory that stays the same; the first `nbytes` of it
    """

    def __init__(self, link: P2pLink, round_bytes: int, device: torch.device, base_device: torch.device | None) -> None:
        """`device`: where messages are packed and encoded; `base_device`: where the base is, by default there, too."""
        bucket = torch.empty(packed_bytes(link.rounds(device)), dtype=torch.uint8, device=device)
        self._messages = LinkMessages(link, device, bucket, written=False)
        self._device, self._base_device = device, base_device or device
        self._round_bytes = round_bytes
        self._begin = [0]
        for nbytes in self._messages.nbytes:
            self._begin.append(self._begin[-1] + -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES)
        self._table_bytes = table_bytes(len(self._messages))
        room = self._table_bytes + self._begin[-1] // _PART
        self.section = torch.empty(room, dtype=torch.uint8, device=device)
        self.nbytes = 0
        self._base: torch.Tensor | None = None
        self._checksums: list[int] = []  # of each message of the base
        self._next: list[int] = []  # of each message that was encoded last
        self._encoded: list[Encoded] = []
        self._encoded_in = self._committed_in = 0  # numbers of updates

    @property
    def checksum(self) -> int:
        """Names the base."""
        return sum(self._checksums) % MODULUS

    def encode(self, update: int) -> bool:
        """Encodes what has changed since the base; returns whether there is one, and the section has room.

        Of several engines that are sent the same, only the first makes it work.
        """
        if self._encoded_in != update:
            self._encoded_in = update
            self._encoded = self._encode() if self._base is not None else []
        return bool(self._encoded)

    def commit(self, update: int) -> None:
        """Makes the weights of `update`, which were sent, whole or not, the base. The shards must be as they were."""
        if self._committed_in == update:  # for another engine
            return
        self._committed_in = update
        if self._encoded_in == update and self._encoded:
            for number, payload in enumerate(self._payloads()):
                encoded, base = self._encoded[number], self._kept(number)
                apply(encoded, payload.to(self._base_device), self._messages.unit_bytes, base)
            self._checksums = self._next
        else:
            self._capture()

    @property
    def memory(self) -> tuple[str, int, int]:
        """Where the section is, as NIXL has it: kind of memory, GPU, address."""
        return *memory_kind(self._device), self.section.data_ptr()

    @property
    def parts(self) -> list[torch.Tensor]:
        """The section, as it is sent: its table, and pieces that fit a round."""
        pieces = cut_section(self._encoded, self._messages, self._round_bytes)
        found = [self.section[: self._table_bytes]]
        return found + [self.section[piece.offset : piece.offset + piece.nbytes] for piece in pieces]

    def _capture(self) -> None:
        if self._base is None:
            self._base = torch.zeros(self._begin[-1], dtype=torch.uint8, device=self._base_device)
        self._checksums = []
        with torch.inference_mode():
            for number in range(len(self._messages)):
                message = self._messages.read(number)
                self._checksums.append(message_checksum(message, self._messages.first_row(number)))
                self._kept(number).copy_(message)

    def _encode(self) -> list[Encoded]:
        messages, unit_bytes = self._messages, self._messages.unit_bytes
        end = self._table_bytes
        found: list[Encoded] = []
        self._next = list(self._checksums)
        with torch.inference_mode():
            for number in range(len(messages)):
                new, base = messages.read(number), self._kept(number).to(self._device)
                encoded = encode(new, base, unit_bytes, self.section[end:])
                if encoded is None:
                    return []
                found.append(encoded)
                end += encoded.payload_bytes(messages.units(number), unit_bytes)
                if encoded.kind is not Kind.SAME:
                    self._next[number] = message_checksum(new, messages.first_row(number))
            self.section[: self._table_bytes].copy_(table(found, self._device))
        self.nbytes = end
        runtime().synchronize([self._device])  # it may be read in no stream's order
        return found

    def _kept(self, number: int) -> torch.Tensor:
        assert self._base is not None
        begin = self._begin[number]
        return self._base[begin : begin + self._messages.nbytes[number]]

    def _payloads(self) -> Sequence[torch.Tensor]:
        sizes = payload_sizes(self._encoded, self._messages)
        return self.section[self._table_bytes : self._table_bytes + sum(sizes)].split(sizes)


def send_sections(sources: Mapping[int, DeltaSource], communicators: P2pCommunicators) -> None:
    """Sends the sections that were encoded last, by peer id, in rounds. Raises as `PendingOps.wait` does."""
    parts = {peer: source.parts for peer, source in sorted(sources.items())}
    pending: list[PendingRound] = []
    for number in range(max(map(len, parts.values()), default=0)):
        if len(pending) == BUCKETS:
            pending.pop(0).wait()
        pending.append(communicators.send([(peer, own[number]) for peer, own in parts.items() if number < len(own)]))
    for ops in pending:
        ops.wait()
