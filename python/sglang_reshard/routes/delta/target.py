"""An engine rank's side of deltas: finds out whether its weights are their base, and overwrites what has changed.

    target.is_base_of(sections)
    target.receive_indexes(sections)    # and checks all that says where values go; nothing is written yet
    target.move(sections)               # the values arrive, and are written

The indexes are kept in memory of this rank's own between the two: the checked bytes are the applied bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.checked.coefficients import MODULUS
from sglang_reshard.observability.report import Traffic
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.delta.checks import is_sound, verdicts
from sglang_reshard.routes.delta.encoding import Kind, apply
from sglang_reshard.routes.delta.incoming import Incoming, PlacedPiece
from sglang_reshard.routes.delta.messages import Encodings, LinkMessages, Piece
from sglang_reshard.routes.delta.offer import Sections
from sglang_reshard.routes.ipc import DirectReads, mapped_reads
from sglang_reshard.routes.p2p.links import engine_links, packed_bytes
from sglang_reshard.routes.p2p.messages import sent_reads
from sglang_reshard.routes.wire.rounds import BUCKETS, run_rounds
from sglang_reshard.shown_names import some_names

if TYPE_CHECKING:  # as everywhere in routes
    from sglang_reshard.trace.program import Program


class _Checked(NamedTuple):
    """The encodings of a trainer rank's messages, and the index of each."""

    encodings: Encodings
    indexes: Sequence[torch.Tensor]


class DeltaTarget:
    """Applies deltas on one engine rank. Reads from mapped memory are always whole.

    traffic      of the last update
    extra_bytes  of its buffers; an update takes memory for its indexes as well, a bit for each unit at most
    """

    def __init__(self, reads: Reads, live: Program, round_bytes: Mapping[int, int], incoming: Incoming) -> None:
        """`live` writes to the live weights; `reads.program` writes to the updated weights, or to a shadow of these.

        round_bytes  trainer rank -> bytes of a round, for the trainer ranks that send
        """
        self._reads, self._round_bytes, self._incoming, device = reads, round_bytes, incoming, reads.device
        written = read = engine_links(reads, round_bytes, as_kept=True)
        if live is not reads.program:
            read = engine_links(reads, round_bytes, live=live, as_kept=True)
        sizes = [packed_bytes(link.rounds(device)) for link in (*written.values(), *read.values())]
        bucket = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self._links = written
        self._written = {t: LinkMessages(link, device, bucket, written=True) for t, link in written.items()}
        self._live = self._written
        if read is not written:
            self._live = {t: LinkMessages(link, device, bucket, written=False) for t, link in read.items()}
        self._limits = {t: max(n, self._written[t].table_bytes) for t, n in round_bytes.items()}
        self._rooms = [
            torch.empty(sum(self._limits.values()), dtype=torch.uint8, device=device) for _ in range(BUCKETS)
        ]
        self._direct = DirectReads(reads, mapped_reads(reads, round_bytes))
        incoming.register(self._rooms)
        self._own_bytes = len(bucket) + sum(map(len, self._rooms)) + self._direct.extra_bytes
        self.traffic = Traffic()
        self._checked: dict[int, _Checked] = {}

    @property
    def extra_bytes(self) -> int:
        return self._own_bytes + self._incoming.extra_bytes

    def is_base_of(self, sections: Sections) -> bool:
        """Returns whether the live weights are the base of these sections: their checksums are equal."""
        if sections.keys() != self._live.keys():
            return False
        with torch.inference_mode():
            return all(
                sum(messages.checksum(number, messages.read(number)) for number in range(len(messages))) % MODULUS
                == sections[t].base
                for t, messages in self._live.items()
                if not sections[t].whole
            )

    def receive_indexes(self, sections: Sections) -> None:
        """Receives tables and indexes, and checks them. Raises as transports do, and Mismatch for damaged data."""
        self._incoming.begin(sections)
        found = self._receive_indexes(sections)
        self._check_indexes(found)
        self._checked = found

    def _receive_indexes(self, sections: Sections) -> dict[int, _Checked]:
        encoded_only = {t: m for t, m in self._written.items() if not sections[t].whole}
        tables = self._placed({t: Piece(0, m.table_bytes) for t, m in encoded_only.items()}, self._rooms[0])
        if tables:
            self._incoming.start(tables)()
        found: dict[int, _Checked] = {}
        kept: dict[int, torch.Tensor] = {}
        for arrived in tables:
            rank = arrived.trainer_rank
            damaged = functools.partial(self._damaged, rank)
            encodings = Encodings.read(arrived.buffer, self._written[rank], sections[rank].nbytes, damaged)
            kept[rank] = torch.empty(sum(encodings.index_bytes), dtype=torch.uint8, device=self._reads.device)
            found[rank] = _Checked(encodings, kept[rank].split(encodings.index_bytes))

        def keep(arrived: PlacedPiece) -> None:
            begin = arrived.offset - self._written[arrived.trainer_rank].table_bytes
            kept[arrived.trainer_rank][begin : begin + len(arrived.buffer)].copy_(arrived.buffer)

        with torch.inference_mode():
            self._run_rounds({t: own.encodings.index_pieces(self._round_bytes[t]) for t, own in found.items()}, keep)
        return found

    def _check_indexes(self, found: Mapping[int, _Checked]) -> None:
        checked = [
            (rank, number, how, index)
            for rank, own in found.items()
            for number, (how, index) in enumerate(zip(own.encodings.encoded, own.indexes, strict=True))
            if len(index)
        ]
        with torch.inference_mode():
            sound = verdicts([is_sound(how, self._written[rank].units[n], index) for rank, n, how, index in checked])
        for (rank, number, how, _), is_right in zip(checked, sound, strict=True):
            if not is_right:
                why = f"the positions of its {how.changed:,} changes ({how.kind.name}) are invalid"
                raise self._damaged(rank, number, why)

    def move(self, sections: Sections) -> None:
        """Receives the values, and writes them. Raises as transports do."""
        checked, self._checked = self._checked, {}
        self._direct.run()

        def write(arrived: PlacedPiece) -> None:
            messages, own = self._written[arrived.trainer_rank], checked[arrived.trainer_rank]
            sizes = [own.encodings.value_bytes[n] for n in arrived.messages]
            with torch.inference_mode():
                for n, values in zip(arrived.messages, arrived.buffer.split(sizes), strict=True):
                    how = own.encodings.encoded[n]
                    if how.kind is not Kind.SAME:
                        apply(how, own.indexes[n], values, messages.unit_bytes, messages.read(n))
                        messages.write(n)

        self._run_rounds({t: own.encodings.value_pieces(self._round_bytes[t]) for t, own in checked.items()}, write)
        self._incoming.receive_whole([t for t, section in sections.items() if section.whole])
        read_bytes = self._direct.read_bytes | {t: sections[t].nbytes for t in self._written}
        changed = sum(message.changed for own in checked.values() for message in own.encodings.encoded)
        compared = sum(sum(self._written[t].units) for t in checked)
        self.traffic = Traffic(sum(read_bytes.values()), read_bytes, compared=compared, changed=changed)

    def _run_rounds(self, pieces: Mapping[int, Sequence[Piece]], arrived: Callable[[PlacedPiece], None]) -> None:
        """Receives a piece of each trainer rank in each round. Calls `arrived` for each."""
        rounds = []
        for number in range(max(map(len, pieces.values()), default=0)):
            of_round = {t: own[number] for t, own in pieces.items() if number < len(own)}
            rounds.append(self._placed(of_round, self._rooms[number % BUCKETS]))

        def ended(number: int) -> None:
            for piece in rounds[number]:
                arrived(piece)

        run_rounds(len(rounds), lambda number: self._incoming.start(rounds[number]), ended)

    def _damaged(self, trainer_rank: int, number: int, why: str) -> Mismatch:
        """Returns the error for a message that trainer rank has encoded as no trainer rank does."""
        layout, plan = self._reads.tensor_index.layout, self._reads.read_plan
        link, tensors = self._links[trainer_rank], plan.tensor_ids[plan.copy_ids[sent_reads(plan, trainer_rank)]]
        items = dict.fromkeys(int(tensors[part.item]) for part in link.messages[number].slices)
        names = [layout.tensors[tensor].name for tensor in items]
        return Mismatch(
            f"trainer rank {trainer_rank} sent engine rank {self._reads.engine_rank} a damaged delta of "
            f"{some_names(names)}: {why}. Nothing of it was written; repeat the update, which "
            f"sends all weights. If it happens again, suspect the memory or the network of trainer rank {trainer_rank}"
        )

    def _placed(self, pieces: Mapping[int, Piece], room: torch.Tensor) -> list[PlacedPiece]:
        """Returns where these pieces arrive, one of each trainer rank."""
        found, begin = [], 0
        for trainer_rank, piece in sorted(pieces.items()):
            found.append(PlacedPiece(trainer_rank, piece.offset, room[begin : begin + piece.nbytes], piece.messages))
            begin += self._limits[trainer_rank]
        return found
