"""Creates the transport that a strategy names."""

from __future__ import annotations

from collections.abc import Callable

from sglang_reshard.plan import Strategy
from sglang_reshard.transports.base import Transport, TransportContext
from sglang_reshard.transports.broadcast import BroadcastTransport
from sglang_reshard.transports.ipc import IpcTransport
from sglang_reshard.transports.nixl import NixlTransport
from sglang_reshard.transports.p2p import P2pTransport

_TRANSPORTS: dict[str, Callable[[TransportContext], Transport]] = {
    "ipc": IpcTransport,
    "p2p": P2pTransport,
    "ipc+p2p": P2pTransport,
    "broadcast": BroadcastTransport,
    "nixl": NixlTransport,
}


def create_transport(strategy: Strategy, context: TransportContext) -> Transport:
    """Returns this engine rank's transport, with all its views and buffers."""
    return _TRANSPORTS[strategy.name](context)
