"""TCP connections as a channel wants them, and kept out of processes that are forked."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 4  # a host that lost power is noticed after half a minute

_own: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen(interface: str) -> socket.socket:
    """On a free port of `interface`, an address of this host."""
    listener = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    try:
        listener.bind((interface, 0))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return own(listener)


def own(connection: socket.socket) -> socket.socket:
    """A child that this process forks would keep the connection open after this process was killed; so it closes it."""
    _own.add(connection)
    return connection


def prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _INTERVAL_S), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_all() -> None:
    for connection in list(_own):
        with contextlib.suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_all)
