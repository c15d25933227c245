"""Gloo process groups, for host memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

_CONNECT_S = 20.0  # for gloo to connect processes that are all running
_EXPIRED = timedelta(milliseconds=1)
_UNUSED_TAG = 0x5EA3  # no message is sent with it
_EXIT_S = 5.0  # for groups to be destroyed when the process ends
_destructions: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _await_destructions() -> None:
    """A process that ends while one of its threads is in torch crashes."""
    end = time.monotonic() + _EXIT_S
    for thread in list(_destructions):
        thread.join(max(0.0, end - time.monotonic()))


class GlooGroup:
    """One rank's end of a gloo process group; see `communicator.ProcessGroup`."""

    interface_variable = "GLOO_SOCKET_IFNAME"
    starts_at_once = True

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        address: str = "",
        _at_once: int = 1,
    ) -> None:
        """`address` is one of this host, at which the others reach it; empty for gloo's choice."""
        self._store, self._rank, self._size, self._address = store, rank, size, address
        self._timeout = timedelta(seconds=timeout_s)
        self._pg: Any = None

    def adopt_stream(self) -> Callable[[], None]:
        return lambda: None

    def connect(self) -> None:
        timeout = min(self._timeout, timedelta(seconds=_CONNECT_S))
        if not self._address or os.environ.get(self.interface_variable):  # a user who sets it knows better
            self._pg = dist.ProcessGroupGloo(self._store, self._rank, self._size, timeout=timeout)
            return
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._timeout = timeout
        # Gloo would use the host's name, which often is resolved to loopback, where other hosts do not find this rank.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        self._pg = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)

    def start(self, verb: str, messages: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[tuple[int, ...], dist.Work]]:
        start = self._pg.send if verb == "send" else self._pg.recv
        return [((peer,), start([buffer], peer, 0)) for peer, buffer in messages]

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, self._timeout
        work: dist.Work = self._pg.broadcast([buffer], options)
        return work

    def wait(self, work: dist.Work, deadline: float) -> None:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def abort(self, pending: tuple[object, ...]) -> None:
        """Closes all connections. When it returns, buffers are no longer written.

        Gloo's own `abort` ends nothing. But a receive that times out closes all connections of its rank. A receive from
        a rank that has died fails before it times out, and closes nothing; so one is posted for every other rank.
        """
        if (pg := self._pg) is None:
            return
        for other in (r for r in range(self._size) if r != self._rank):
            with contextlib.suppress(RuntimeError):  # the timeout, or this connection is broken already
                pg.recv([torch.empty(1)], other, _UNUSED_TAG).wait(_EXPIRED)
        # Destroying a gloo group joins its threads, one of which may be in a broadcast until its timeout.
        last = [pg]
        self._pg = None
        del pg
        thread = threading.Thread(target=last.clear, name="sglang-reshard group destruction", daemon=True)
        _destructions.add(thread)
        thread.start()

    def close(self) -> None:
        self._pg = None
