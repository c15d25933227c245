"""The arrival of sections on an engine rank: sent by trainer ranks, or read from their memory with NIXL."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reshard.errors import DeadlineExceeded, Mismatch
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.delta.offer import Sections
from sglang_reshard.routes.nixl.agent import memory_kind
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.streams import Stream, read_streams
from sglang_reshard.routes.p2p.links import Round, build_rounds, engine_links
from sglang_reshard.routes.wire.communicator import Communicators
from sglang_reshard.routes.wire.rounds import Wait, run_rounds

_POLL_S = 1e-4


class PlacedPiece(NamedTuple):
    """A piece of a trainer rank's section, from `offset`, where it arrives, and the messages whose values it has."""

    trainer_rank: int
    offset: int
    buffer: torch.Tensor
    messages: range


class Incoming:
    """The arrival of sections.

    extra_bytes  of buckets that the last update needed in addition, for messages that came as they are
    """

    extra_bytes: int = 0

    def register(self, rooms: Sequence[torch.Tensor]) -> None:
        """Lets pieces arrive in these buffers."""

    def begin(self, sections: Sections) -> None:
        """Raises Mismatch for sections that cannot arrive."""

    def start(self, pieces: Sequence[PlacedPiece]) -> Wait:
        """Starts the transit of pieces, at least one. Returns a call that waits for the end."""
        raise NotImplementedError

    def receive_whole(self, trainer_ranks: Sequence[int]) -> None:
        """Receives all messages of these trainer ranks as they are, and brings them to where they belong."""
        raise NotImplementedError


class P2pReceives(Incoming):
    """Trainer ranks send them."""

    def __init__(self, communicators: Communicators | None, reads: Reads, sizes: Mapping[int, int]) -> None:
        """`communicators`: None if all is read from mapped memory. `sizes`: bytes of a round, by trainer rank."""
        self._communicators, self._reads, self._sizes = communicators, reads, sizes
        self._whole: tuple[tuple[int, ...], list[Round]] = (), []

    def start(self, pieces: Sequence[PlacedPiece]) -> Wait:
        assert self._communicators is not None, "a trainer rank sends"
        return self._communicators.receive([(piece.trainer_rank, piece.buffer) for piece in pieces]).wait

    def receive_whole(self, trainer_ranks: Sequence[int]) -> None:
        communicators, wanted = self._communicators, tuple(trainer_ranks)
        if communicators is None:
            return
        if self._whole[0] != wanted:
            self._whole, self.extra_bytes = ((), []), 0  # so that its buckets are freed
            if wanted:
                links = engine_links(self._reads, {t: self._sizes[t] for t in wanted}, as_kept=True)
                built, self.extra_bytes = build_rounds(links, self._reads.device, pack=False)
                self._whole = wanted, built
        rounds = self._whole[1]
        run_rounds(len(rounds), lambda n: communicators.receive(rounds[n][0]).wait, lambda n: rounds[n][1].run())


class NixlReads(Incoming):
    """This rank reads them out of the trainer ranks' memory."""

    def __init__(self, reader: NixlReader, reads: Reads, streams: Mapping[int, Stream]) -> None:
        """`streams`: trainer rank -> what reads all of it."""
        self._reader, self._device, self._reads, self._streams = reader, reads.device, reads, streams
        self._rank, self._timeout_s = reads.engine_rank, reads.timeout_s
        self._sections: Sections = {}

    def register(self, rooms: Sequence[torch.Tensor]) -> None:
        self._reader.register([room.untyped_storage() for room in rooms])

    def begin(self, sections: Sections) -> None:
        for trainer_rank, section in sections.items():
            if not section.kind:
                raise Mismatch(
                    f"trainer rank {trainer_rank} did not announce the delta that engine rank {self._rank} reads. "
                    "Nothing was written; repeat the update, which sends all weights"
                )
        self._sections = sections

    def start(self, pieces: Sequence[PlacedPiece]) -> Wait:
        reads: list[tuple[str, list[Any]]] = []
        runtime().synchronize([self._device])  # what was there before may still be read; no stream orders these reads
        for piece in pieces:
            section, peer = self._sections[piece.trainer_rank], f"trainer rank {piece.trainer_rank}"
            kind, gpu = memory_kind(piece.buffer.device)
            remote = np.array([[section.address + piece.offset, len(piece.buffer), section.gpu]])
            local = np.array([[piece.buffer.data_ptr(), len(piece.buffer), gpu]])
            reads.append((peer, [self._reader.prepare(peer, (section.kind, remote), (kind, local))]))
            self._reader.start(*reads[-1])
        return functools.partial(self._wait, reads)

    def _wait(self, reads_of_peers: Sequence[tuple[str, list[Any]]]) -> None:
        """Raises PeerDisconnected if a read fails, and DeadlineExceeded."""
        deadline = time.monotonic() + self._timeout_s
        for peer, reads in reads_of_peers:
            while not self._reader.are_done(peer, reads):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"engine rank {self._rank} could not finish reading from {peer} in time. Is that rank's "
                        "process stopped, or its host unreachable?"
                    )
                time.sleep(_POLL_S)
            self._reader.release(reads)

    def receive_whole(self, trainer_ranks: Sequence[int]) -> None:
        read_streams(self._reads, [self._streams[trainer_rank] for trainer_rank in trainer_ranks])
