"""Reads an engine rank's part from a rank of another engine, as far as that has it already."""

from __future__ import annotations

import time

import torch

from sglang_reshard.errors import PeerDisconnected
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.streams import Stream
from sglang_reshard.routes.read_link import ReadLink
from sglang_reshard.routes.relay.progress import RelayGate, RelayLost


class RelayedStream(Stream):
    """A stream whose messages wait until the peer has what they bring. Its methods raise RelayLost if it will not."""

    def __init__(self, reader: NixlReader, peer: str, link: ReadLink, device: torch.device, gate: RelayGate) -> None:
        super().__init__(reader, peer, link, device)
        self._gate, self._advanced_at = gate, 0.0
        self._needed = [max(tensors) + 1 for tensors in link.tensors]  # complete tensors, for each message

    def begin_update(self, update: int) -> None:
        self.begin()
        self._gate.begin(update)
        self._advanced_at = time.monotonic()

    def advance(self) -> bool:
        if self.started > self.finished:
            self._gate.check_stalled(self._advanced_at)
        before = self.finished, self.started
        try:
            advanced = super().advance()
        except PeerDisconnected as error:
            if self.reader.aborted:
                raise
            raise RelayLost(self._gate.engine, f"cannot be read: {error}") from error
        if before != (self.finished, self.started):
            self._advanced_at = time.monotonic()
        return advanced

    def may_start(self, number: int) -> bool:
        return self._gate.is_open(self._needed[number])

    def confirm(self) -> bool:
        return self._gate.confirm()
