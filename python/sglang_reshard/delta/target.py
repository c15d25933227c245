"""An engine rank's side of deltas: finds out whether its weights are their base, and overwrites what has changed.

    target.is_base_of(sections)
    target.receive_indexes(sections)    # and checks all that says where values go; nothing is written yet
    target.move(sections)               # the values arrive, and are written

The indexes are kept in memory of this rank's own between the two: what was checked is what is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_reshard.delta.checks import is_sound, verdicts
from sglang_reshard.delta.encoding import Encoded, Kind, apply
from sglang_reshard.delta.incoming import Incoming, NixlReads, P2pReceives, Part
from sglang_reshard.delta.messages import (
    LinkMessages,
    Piece,
    cut_indexes,
    cut_values,
    index_sizes,
    read_table,
    table_bytes,
    value_sizes,
)
from sglang_reshard.delta.section import Sections
from sglang_reshard.digest.coefficients import MODULUS
from sglang_reshard.errors import Mismatch
from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.ipc import DirectReads, mapped_reads
from sglang_reshard.transports.p2p import BUCKETS, P2pLink, engine_links, packed_bytes, sent_tensors

if TYPE_CHECKING:  # as everywhere in transports
    from sglang_reshard.trace.program import Program

_SHOWN_NAMES = 3


class _Checked(NamedTuple):
    """How the messages of a trainer rank are encoded, and the index of each."""

    encoded: list[Encoded]
    indexes: Sequence[torch.Tensor]


class DeltaTarget:
    """Applies deltas on one engine rank. What it reads from mapped memory, it reads whole.

    received_bytes, read_bytes   of the last update, as `Transport` has them
    compared, changed            units of all messages, and those that it changed
    extra_bytes                  of its buffers; an update takes memory for its indexes as well, a bit for each unit at
                                 most
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
        self._links = written
        self._written = {t: LinkMessages(link, device, bucket, written=True) for t, link in written.items()}
        self._live = self._written
        if read is not written:
            self._live = {t: LinkMessages(link, device, bucket, written=False) for t, link in read.items()}
        self._limits = {t: max(n, table_bytes(len(self._written[t]))) for t, n in context.round_bytes.items()}
        self._rooms = [
            torch.empty(sum(self._limits.values()), dtype=torch.uint8, device=device) for _ in range(BUCKETS)
        ]
        self._direct = DirectReads(context, mapped_reads(context))
        self._incoming: Incoming
        if context.nixl is not None:
            self._incoming = NixlReads(context.nixl, context)
            context.nixl.register([room.untyped_storage() for room in self._rooms])
        else:
            self._incoming = P2pReceives(context)
        self.extra_bytes = len(bucket) + sum(map(len, self._rooms)) + self._direct.extra_bytes
        self.received_bytes, self.read_bytes = 0, dict[int, int]()
        self.compared = sum(m.units(n) for m in self._written.values() for n in range(len(m)))
        self.changed = 0
        self._checked: dict[int, _Checked] = {}

    def is_base_of(self, sections: Sections) -> bool:
        """Returns whether the live weights are what these sections change: their checksums are equal."""
        if sections.keys() != self._live.keys():
            return False
        with torch.inference_mode():
            return all(
                sum(messages.checksum(number) for number in range(len(messages))) % MODULUS == sections[t].base
                for t, messages in self._live.items()
            )

    def receive_indexes(self, sections: Sections) -> None:
        """Receives tables and indexes, and checks them. Raises as transports do, and Mismatch for what is damaged.

        On failure it closes the connections, so that ranks that wait for this one fail as well.
        """
        try:
            self._incoming.begin(sections)
            self._checked = self._receive_indexes(sections)
            self._check_indexes()
        except BaseException:
            self._checked = {}
            self._incoming.close()
            raise

    def move(self, sections: Sections) -> None:
        """Receives the values, and writes them. Raises as transports do, and closes the connections then."""
        try:
            self._move(sections)
        except BaseException:
            self._incoming.close()
            raise
        finally:
            self._checked = {}

    def _receive_indexes(self, sections: Sections) -> dict[int, _Checked]:
        tables = self._parts({t: Piece(0, table_bytes(len(m))) for t, m in self._written.items()}, self._rooms[0])
        self._incoming.start(tables).wait()
        found: dict[int, _Checked] = {}
        pieces: dict[int, list[Piece]] = {}
        received: dict[int, torch.Tensor] = {}
        for part in tables:
            rank, messages = part.trainer_rank, self._written[part.trainer_rank]

            def damaged(number: int, why: str, rank: int = rank) -> Mismatch:
                return self._damaged(rank, number, why)

            encoded = read_table(part.buffer, messages, sections[rank].nbytes, damaged)
            sizes = index_sizes(encoded, messages)
            received[rank] = torch.empty(sum(sizes), dtype=torch.uint8, device=self._context.device)
            found[rank] = _Checked(encoded, received[rank].split(sizes))
            pieces[rank] = cut_indexes(encoded, messages, self._context.round_bytes[rank])
        done = dict.fromkeys(received, 0)
        with torch.inference_mode():
            for parts in self._rounds(pieces):
                for part in parts:
                    begin = done[part.trainer_rank]
                    done[part.trainer_rank] = end = begin + len(part.buffer)
                    received[part.trainer_rank][begin:end].copy_(part.buffer)
        return found

    def _check_indexes(self) -> None:
        numbered, sound = [], []
        with torch.inference_mode():
            for rank, (encoded, indexes) in self._checked.items():
                for number, (how, index) in enumerate(zip(encoded, indexes, strict=True)):
                    if how.kind in (Kind.POSITIONS, Kind.MASK):
                        numbered.append((rank, number))
                        sound.append(is_sound(how, self._written[rank].units(number), index))
            for (rank, number), is_right in zip(numbered, verdicts(sound), strict=True):
                if not is_right:
                    how = self._checked[rank].encoded[number]
                    raise self._damaged(
                        rank, number, f"what says where its {how.changed:,} changes are ({how.kind.name}) is invalid"
                    )

    def _move(self, sections: Sections) -> None:
        self._direct.run()
        sizes = self._context.round_bytes
        pieces = {t: cut_values(own.encoded, self._written[t], sizes[t]) for t, own in self._checked.items()}
        for number, parts in enumerate(self._rounds(pieces)):
            for part in parts:
                rank = part.trainer_rank
                _apply(self._written[rank], self._checked[rank], pieces[rank][number].messages, part.buffer)
        self.read_bytes = self._direct.read_bytes | {t: sections[t].nbytes for t in self._written}
        self.received_bytes = sum(self.read_bytes.values())
        self.changed = sum(message.changed for own in self._checked.values() for message in own.encoded)

    def _rounds(self, pieces: Mapping[int, Sequence[Piece]]) -> Iterator[list[Part]]:
        """Yields what has arrived, round by round: of each trainer rank a piece, until the next one is asked for."""
        rounds = []
        for number in range(max(map(len, pieces.values()), default=0)):
            of_round = {t: own[number] for t, own in pieces.items() if number < len(own)}
            rounds.append(self._parts(of_round, self._rooms[number % BUCKETS]))
        pending = [self._incoming.start(parts) for parts in rounds[:BUCKETS]]
        for number, parts in enumerate(rounds):
            pending.pop(0).wait()
            yield parts
            pending += [self._incoming.start(following) for following in rounds[number + BUCKETS :][:1]]

    def _damaged(self, trainer_rank: int, number: int, why: str) -> Mismatch:
        """Returns the error for a message that trainer rank has encoded as no trainer rank does."""
        layout, link = self._context.tensor_index.layout, self._links[trainer_rank]
        tensors = sent_tensors(self._context.read_plan, trainer_rank)
        items = dict.fromkeys(int(tensors[part.item]) for part in link.messages[number].slices)
        names = [layout.tensors[tensor].name for tensor in items]
        more = f" and {len(names) - _SHOWN_NAMES} more tensors" if len(names) > _SHOWN_NAMES else ""
        return Mismatch(
            f"trainer rank {trainer_rank} sent engine rank {self._context.engine_rank} a damaged delta of "
            f"{', '.join(names[:_SHOWN_NAMES])}{more}: {why}. Nothing of it was written; repeat the update, which "
            f"sends all weights. If it happens again, suspect the memory or the network of trainer rank {trainer_rank}"
        )

    def _parts(self, pieces: Mapping[int, Piece], room: torch.Tensor) -> list[Part]:
        """Returns where these pieces arrive, one of each trainer rank."""
        found, begin = [], 0
        for trainer_rank, piece in sorted(pieces.items()):
            found.append(Part(trainer_rank, piece.offset, room[begin : begin + piece.nbytes]))
            begin += self._limits[trainer_rank]
        return found


def _apply(messages: LinkMessages, checked: _Checked, run: range, data: torch.Tensor) -> None:
    sizes = value_sizes(checked.encoded, messages)[run.start : run.stop]
    with torch.inference_mode():
        for number, values in zip(run, data.split(sizes), strict=True):
            how = checked.encoded[number]
            if how.kind is not Kind.SAME:
                apply(how, checked.indexes[number], values, messages.unit_bytes, messages.read(number))
                messages.write(number)
