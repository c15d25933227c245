"""Process groups outside of torch.distributed's default world, whose waits another thread can abort."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.errors import ReshardError

_CONNECT_S = 20.0  # for gloo to connect processes that are all running
_EXPIRED = timedelta(milliseconds=1)
_UNUSED_TAG = 0x5EA3  # no message is sent with it


class PeerDisconnected(ReshardError):
    """The connection to another rank broke. Most often that rank has failed, and reports the cause."""


class AbortableGroup:
    """One rank's end of a process group. `pg` is None once it has been closed."""

    def __init__(self, pg: Any, backend: str, rank: int, size: int) -> None:
        """`rank` is this process's rank within the group of `size`; `backend` is "gloo" or "nccl"."""
        self.pg: Any = pg
        self.backend, self._rank, self._size = backend, rank, size
        self._changed, self._aborted = threading.Condition(), False

    def run_abortable(self, wait: Callable[[], object]) -> None:
        """Runs `wait`, which blocks on messages. Raises what it raises, and RuntimeError once the group is aborted.

        On gloo it runs in a thread of its own. When a connection breaks, gloo (torch 2.11) ends the waits for messages
        that have not begun to arrive, and forgets those that are halfway: these last until their own timeout, and
        nothing that Python can reach ends them sooner. That thread is then left behind until the timeout, with the
        message's buffer, to which nothing is written any more.
        """
        if self.backend == "nccl":
            wait()
            return
        ended, failed = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                wait()
            except BaseException as error:
                failed.append(error)
            with self._changed:
                ended.set()
                self._changed.notify_all()

        threading.Thread(target=run, name="sglang-reshard wait", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or ended.is_set())
        if failed:
            raise failed.pop()  # nothing here keeps it: its traceback refers to the buffers
        if not ended.is_set():
            raise RuntimeError("the process group was aborted")

    def abort(self) -> None:
        """Closes all connections and ends this rank's waits. May be called from any thread.

        Gloo's own `abort` ends nothing. But a receive that times out closes all connections of its rank. A receive from
        a rank that has died fails before it times out, and closes nothing; so one is posted for every other rank.
        """
        if (pg := self._detach()) is None:
            return
        for other in (r for r in range(self._size) if r != self._rank):
            with contextlib.suppress(RuntimeError):  # the timeout, or this connection is broken already
                pg.recv([torch.empty(1)], other, _UNUSED_TAG).wait(_EXPIRED)
        with self._changed:
            self._aborted = True  # from here on nothing is written to the buffers
            self._changed.notify_all()
        # Destroying a gloo group joins its threads, one of which may be in a broadcast until its timeout.
        last = [pg]
        del pg
        threading.Thread(target=last.clear, name="sglang-reshard group destruction", daemon=True).start()

    def close_idle(self) -> None:
        """Closes all connections. No message may be pending: gloo would keep its connection until it has arrived."""
        self._detach()

    def _detach(self) -> Any:
        """Returns the gloo group that is to be closed. None if it has been, and on NCCL, whose own abort suffices."""
        with self._changed:
            pg, self.pg = self.pg, None
        if pg is not None and self.backend == "nccl":
            pg.abort()
            return None
        return pg


def connect_gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=min(timeout_s, _CONNECT_S)))
