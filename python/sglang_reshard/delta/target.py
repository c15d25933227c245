"""An engine rank's side of deltas: finds out whether its weights are their base, and overwrites what has changed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_reshard.delta.encoding import Encoded, Kind, apply
from sglang_reshard.delta.messages import LinkMessages, cut_section, read_table, table_bytes
from sglang_reshard.delta.section import Sections
from sglang_reshard.digest.coefficients import MODULUS
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.ipc import DirectReads, mapped_reads
from sglang_reshard.transports.nixl_agent import memory_kind
from sglang_reshard.transports.nixl_reader import NixlReader
from sglang_reshard.transports.p2p import BUCKETS, P2pLink, engine_links, packed_bytes

if TYPE_CHECKING:  # as everywhere in transports
    from sglang_reshard.trace.program import Program

_POLL_S = 1e-4


class _Part(NamedTuple):
    """Bytes of a trainer rank's section, from `offset`, and where they arrive."""

    trainer_rank: int
    offset: int
    buffer: torch.Tensor


class DeltaTarget:
    """Applies deltas on one engine rank. What it reads from mapped memory, it reads whole.

    received_bytes, read_bytes   of the last update, as `Transport` has them
    compared, changed            units of all messages, and those that it changed
    extra_bytes                  of its buffers
    """

    def __init__(self, context: TransportContext, live: Program) -> None:
        """`live` writes to the live weights; `context.program` does to what is updated, perhaps a shadow of these."""
        self._context, device = context, context.device
        layout, plan = context.tensor_index.layout, context.read_plan

        def links(program: Program) -> dict[int, P2pLink]:
            return engine_links(layout, plan, program, context.round_bytes, as_kept=True)

        written = links(context.program)
        read = written if live is context.program else links(live)
        sizes = [packed_bytes(link.rounds(device)) for link in (*written.values(), *read.values())]
        bucket = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self._written = {t: LinkMessages(link, device, bucket, written=True) for t, link in written.items()}
        self._live = self._written
        if read is not written:
            self._live = {t: LinkMessages(link, device, bucket, written=False) for t, link in read.items()}
        self._limits = {t: max(n, table_bytes(len(self._written[t]))) for t, n in context.round_bytes.items()}
        self._rooms = [
            torch.empty(sum(self._limits.values()), dtype=torch.uint8, device=device) for _ in range(BUCKETS)
        ]
        self._direct = DirectReads(context, mapped_reads(context))
        self._incoming: _Incoming
        if context.nixl is not None:
            self._incoming = _NixlReads(context.nixl, context)
            context.nixl.register([room.untyped_storage() for room in self._rooms])
        else:
            self._incoming = _P2pReceives(context)
        self.extra_bytes = len(bucket) + sum(map(len, self._rooms)) + self._direct.extra_bytes
        self.received_bytes, self.read_bytes = 0, dict[int, int]()
        self.compared = sum(m.units(n) for m in self._written.values() for n in range(len(m)))
        self.changed = 0

    def is_base_of(self, sections: Sections) -> bool:
        """Returns whether the live weights are what these sections change: their checksums are equal."""
        if sections.keys() != self._live.keys():
            return False
        with torch.inference_mode():
            return all(
                sum(messages.checksum(number) for number in range(len(messages))) % MODULUS == sections[t].base
                for t, messages in self._live.items()
            )

    def move(self, sections: Sections) -> None:
        """Receives and applies. Raises as transports do, and Mismatch for what does not fit.

        On failure it closes the connections, so that ranks that wait for this one fail as well.
        """
        try:
            self._move(sections)
        except BaseException:
            self._incoming.close()
            raise

    def _move(self, sections: Sections) -> None:
        self._incoming.begin(sections)
        tables = self._parts({t: (0, table_bytes(len(m))) for t, m in self._written.items()}, self._rooms[0])
        self._incoming.start(tables).wait()
        encoded = {
            part.trainer_rank: read_table(
                part.buffer,
                self._written[part.trainer_rank],
                sections[part.trainer_rank].nbytes,
                f"trainer rank {part.trainer_rank}",
            )
            for part in tables
        }
        sizes = self._context.round_bytes
        pieces = {t: cut_section(of_link, self._written[t], sizes[t]) for t, of_link in encoded.items()}
        self._direct.run()
        rounds = []
        for number in range(max(map(len, pieces.values()), default=0)):
            ranges = {t: (own[number].offset, own[number].nbytes) for t, own in pieces.items() if number < len(own)}
            rounds.append(self._parts(ranges, self._rooms[number % BUCKETS]))
        pending = [self._incoming.start(parts) for parts in rounds[:BUCKETS]]
        for number, parts in enumerate(rounds):
            pending.pop(0).wait()
            for part in parts:
                rank, run = part.trainer_rank, pieces[part.trainer_rank][number].messages
                _apply(self._written[rank], encoded[rank], run, part.buffer)
            pending += [self._incoming.start(following) for following in rounds[number + BUCKETS :][:1]]
        self.read_bytes = self._direct.read_bytes | {t: sections[t].nbytes for t in self._written}
        self.received_bytes = sum(self.read_bytes.values())
        self.changed = sum(message.changed for of_link in encoded.values() for message in of_link)

    def _parts(self, ranges: Mapping[int, tuple[int, int]], room: torch.Tensor) -> list[_Part]:
        """Returns where these bytes arrive: trainer rank -> (offset, bytes)."""
        found, begin = [], 0
        for trainer_rank, (offset, nbytes) in sorted(ranges.items()):
            found.append(_Part(trainer_rank, offset, room[begin : begin + nbytes]))
            begin += self._limits[trainer_rank]
        return found


def _apply(messages: LinkMessages, encoded: Sequence[Encoded], run: range, data: torch.Tensor) -> None:
    begin = 0
    with torch.inference_mode():
        for number in run:
            how = encoded[number]
            if how.kind is Kind.SAME:
                continue
            end = begin + how.payload_bytes(messages.units(number), messages.unit_bytes)
            apply(how, data[begin:end], messages.unit_bytes, messages.read(number))
            messages.write(number)
            begin = end


class _Pending(Protocol):
    def wait(self) -> None: ...


class _Incoming(Protocol):
    """How sections arrive."""

    def begin(self, sections: Sections) -> None: ...

    def start(self, parts: Sequence[_Part]) -> _Pending: ...

    def close(self) -> None: ...


class _P2pReceives:
    """Trainer ranks send them."""

    def __init__(self, context: TransportContext) -> None:
        self._communicators = context.p2p

    def begin(self, sections: Sections) -> None:
        pass

    def start(self, parts: Sequence[_Part]) -> _Pending:
        if self._communicators is None:  # all is read from mapped memory
            return _Nothing()
        return self._communicators.receive([(part.trainer_rank, part.buffer) for part in parts])

    def close(self) -> None:
        if self._communicators is not None:
            self._communicators.close()


class _Nothing:
    def wait(self) -> None:
        pass


class _NixlReads:
    """This rank reads them out of the trainer ranks' memory."""

    def __init__(self, reader: NixlReader, context: TransportContext) -> None:
        self._reader, self._device = reader, context.device
        self._rank, self._timeout_s = context.engine_rank, context.timeout_s
        self._sections: Sections = {}

    def begin(self, sections: Sections) -> None:
        self._sections = sections

    def start(self, parts: Sequence[_Part]) -> _Pending:
        reads: list[tuple[str, list[Any]]] = []
        runtime().synchronize([self._device])  # what was there before may still be read; no stream orders these reads
        for part in parts:
            section, peer = self._sections[part.trainer_rank], f"trainer rank {part.trainer_rank}"
            kind, gpu = memory_kind(part.buffer.device)
            remote = np.array([[section.address + part.offset, len(part.buffer), section.gpu]])
            local = np.array([[part.buffer.data_ptr(), len(part.buffer), gpu]])
            reads.append((peer, [self._reader.prepare(peer, (section.kind, remote), (kind, local))]))
            self._reader.start(*reads[-1])
        return _PendingReads(self._reader, reads, self._rank, self._timeout_s)

    def close(self) -> None:
        self._reader.close()


class _PendingReads:
    def __init__(
        self, reader: NixlReader, reads: list[tuple[str, list[Any]]], engine_rank: int, timeout_s: float
    ) -> None:
        self._reader, self._reads, self._rank, self._timeout_s = reader, reads, engine_rank, timeout_s

    def wait(self) -> None:
        """Raises PeerDisconnected if a read fails, and DeadlineExceeded."""
        deadline = time.monotonic() + self._timeout_s
        for peer, reads in self._reads:
            while not self._reader.are_done(peer, reads):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"engine rank {self._rank} could not finish reading from {peer} in time; is that rank's "
                        "process stopped, or its host unreachable?"
                    )
                time.sleep(_POLL_S)
            self._reader.release(reads)
