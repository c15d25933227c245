"""A process group's connections, as a transport has them: every wait for them can be ended from another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from sglang_reshard.errors import ReshardError

CONNECT_S = 20.0  # for gloo to connect processes that are all there
_AT_ONCE = timedelta(milliseconds=1)
_NEVER_SENT = 0x5EA3  # the tag of a message that nobody sends


class PeerDisconnected(ReshardError):
    """To another rank. Most often that rank has failed, and tells why."""


class AbortableGroup:
    """Of one rank in a group that torch.distributed knows not of. `pg` is None once they are broken."""

    def __init__(self, pg: Any, backend: str, rank: int, size: int) -> None:
        """`rank` is this process's in the group, of `size`; `backend` is "gloo" or "nccl"."""
        self.pg: Any = pg
        self.backend, self._rank, self._size = backend, rank, size
        self._changed, self._closed = threading.Condition(), False

    def wait(self, step: Callable[[], object]) -> None:
        """Do a step that waits for messages. Raises what it raises, and RuntimeError once the connections are broken.

        On gloo another thread does it. When a connection breaks, gloo (torch 2.11) ends the waits for messages that
        have not begun to travel, and forgets those that are halfway: these last until their own deadline, and nothing
        that Python can reach ends them sooner. So that thread is left behind, with the message's memory, which nobody
        writes any more, until then.
        """
        if self.backend == "nccl":
            step()
            return
        ended, failed = threading.Event(), list[BaseException]()

        def take() -> None:
            try:
                step()
            except BaseException as error:
                failed.append(error)
            with self._changed:
                ended.set()
                self._changed.notify_all()

        threading.Thread(target=take, name="sglang-reshard wait", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or ended.is_set())
        if failed:
            raise failed.pop()  # nothing here keeps it: its traceback holds the messages
        if not ended.is_set():
            raise RuntimeError("they were closed while it waited")

    def drop(self) -> None:
        """Close all connections, of which none has a message under way: gloo would keep it until that has arrived."""
        self._take()

    def break_off(self) -> None:
        """From any thread: close all connections, and end this rank's waits.

        Gloo's own `abort` ends nothing. But a wait for a message that runs out closes all connections of its rank. One
        for a message of a rank that has died fails before it runs out, and closes nothing: so every rank is waited for.
        """
        if (pg := self._take()) is None:
            return
        for other in (r for r in range(self._size) if r != self._rank):
            with contextlib.suppress(RuntimeError):  # which is what it is for; or this connection is broken already
                pg.recv([torch.empty(1)], other, _NEVER_SENT).wait(_AT_ONCE)
        with self._changed:
            self._closed = True  # by now nobody writes into a message any more
            self._changed.notify_all()
        # The end of a group joins its threads, of which one may be in a broadcast until its deadline.
        last = [pg]
        del pg
        threading.Thread(target=last.clear, name="sglang-reshard group's end", daemon=True).start()

    def _take(self) -> Any:
        """The group, for who ends it on gloo; None if somebody has, and on NCCL, where its own abort does all."""
        with self._changed:
            pg, self.pg = self.pg, None
        if pg is not None and self.backend == "nccl":
            pg.abort()
            return None
        return pg
