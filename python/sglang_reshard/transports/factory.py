"""From the way that was chosen to the transport that goes it."""

from __future__ import annotations

from collections.abc import Callable

from sglang_reshard.plan import Strategy
from sglang_reshard.transports.base import Transport, TransportContext
from sglang_reshard.transports.broadcast import BroadcastTransport
from sglang_reshard.transports.ipc import IpcTransport
from sglang_reshard.transports.mixed import MixedTransport
from sglang_reshard.transports.p2p import P2pTransport

_TRANSPORTS: dict[str, Callable[[TransportContext], Transport]] = {
    "ipc": IpcTransport,
    "p2p": P2pTransport,
    "ipc+p2p": MixedTransport,
    "broadcast": BroadcastTransport,
}


def build(choice: Strategy, here: TransportContext) -> Transport:
    """This rank's part, with all its views and buffers."""
    return _TRANSPORTS[choice.name](here)
