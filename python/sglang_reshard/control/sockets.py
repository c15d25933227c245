"""TCP sockets of the control plane: kept alive, without delay, and closed in processes that are forked.

A host that vanishes without a word (its link is down, it has lost power) is noticed within 10 s: by keepalive while
nothing is under way, and by `silent_seconds` while sent bytes are not acknowledged: then no keepalive is sent, and TCP
itself would go on for a quarter of an hour. A process that is only stopped is not: its host acknowledges.
"""

from __future__ import annotations

import asyncio.trsock
import contextlib
import ipaddress
import os
import socket
import struct
import weakref

from sglang_reshard.errors import Unsupported

LOOK_S = 1.0  # how often to look at `silent_seconds`
SILENT_S = 7.0
_IDLE_S, _INTERVAL_S, _PROBES = 3, 2, 2
# struct tcp_info of Linux: 8 bytes of flags, then unsigned integers, among them segments that are not acknowledged, and
# milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("=8x13I")
_UNACKNOWLEDGED, _SINCE_ACKNOWLEDGED = 4, 12

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen(interface: str) -> socket.socket:
    """Listens on a free port of `interface`, an address of this host.

    Raises OSError for the address of another host, and Unsupported for one that means all of this host's interfaces.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    _open.add(listener)
    try:
        listener.bind((interface, 0))
        if ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_unspecified:
            raise Unsupported(
                f"interface={interface!r} means all interfaces of this host, and peers cannot connect to that. Pass "
                "one address of this host that they can reach"
            )
        listener.listen(4096)
    except (OSError, Unsupported):
        listener.close()
        raise
    return listener


def configure(connection: socket.socket) -> socket.socket:
    """Sets keepalive and no-delay, and lets forked children close the socket.

    A child that kept it would hold the connection open after this process was killed.
    """
    _open.add(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _INTERVAL_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def silent_seconds(connection: socket.socket | asyncio.trsock.TransportSocket) -> float:
    """Returns how long the other end has acknowledged nothing, while something is under way to it; else 0.

    Not longer than keepalive's first probe is waited for, if its host is there: an idle connection is probed, and the
    probes are acknowledged. Raises OSError for a connection that is closed.
    """
    if not hasattr(socket, "TCP_INFO"):  # not on every system
        return 0.0
    info = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return info[_SINCE_ACKNOWLEDGED] / 1000 if info[_UNACKNOWLEDGED] else 0.0


def _close_all() -> None:
    for connection in list(_open):
        with contextlib.suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_all)
