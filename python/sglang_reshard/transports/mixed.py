"""Exact boxes over several hosts: read from trainer ranks on this one while those on others send theirs."""

from __future__ import annotations

from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.ipc import IpcTransport
from sglang_reshard.transports.p2p import P2pTransport


class MixedTransport:
    """See the module's text."""

    def __init__(self, here: TransportContext) -> None:
        self._near, self._far = IpcTransport(here), P2pTransport(here)
        self.read_bytes = self._near.read_bytes | self._far.read_bytes
        self.received_bytes = self._near.received_bytes + self._far.received_bytes
        self.extra_bytes = self._far.extra_bytes

    def move(self) -> None:
        self._far.start()
        self._near.move()
        self._far.finish()
