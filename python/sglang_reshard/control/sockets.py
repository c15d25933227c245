"""TCP sockets of the control plane: kept alive, without delay, and closed in processes that are forked."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 4  # a host that lost power is noticed after half a minute

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen(interface: str) -> socket.socket:
    """Listens on a free port of `interface`, an address of this host. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    _open.add(listener)
    try:
        listener.bind((interface, 0))
        listener.listen(4096)
    except OSError:
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


def _close_all() -> None:
    for connection in list(_open):
        with contextlib.suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_all)
