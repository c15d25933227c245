"""A rank's connection to the hub of its session."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sglang_reshard.control import protocol
from sglang_reshard.control.address import Address
from sglang_reshard.control.connection import GRACE_S, STALL_S, ControlConnection
from sglang_reshard.errors import Aborted, ConnectionLost, ReshardError

T = TypeVar("T")

_CLOSE_S = 2.0


class WaitTimedOut(Exception):
    """Not everything came in time. For callers to put in words that a user understands.

    missing  indices of the keys, or of the gather's members, that did not come
    """

    def __init__(self, missing: tuple[int, ...]) -> None:
        super().__init__(f"did not come in time: {missing}")
        self.missing = missing


class ControlClient:
    """Everything raises ConnectionLost once the hub or the session has gone. Any number of threads may wait at once."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        """Connect, within `timeout_s`. Raises DeadlineExceeded when nothing answers, Unauthorized for a wrong key."""
        self.address = address
        self._patience_s = min(timeout_s, STALL_S)
        self._state = threading.Lock()
        self._watches: dict[str, list[Callable[[str], None]]] = {}
        self._losses: list[Callable[[], None]] = []
        self._loss: str | None = None
        self._closed = False
        self._kept: list[object] = []
        self._link = ControlConnection(address, timeout_s, self._on_abort, self._on_loss)

    # -- keys

    def set(self, items: Mapping[str, bytes]) -> None:
        self._ask(protocol.Ok, protocol.Set, dict(items))

    def get(self, keys: Sequence[str], timeout_s: float, scope: str = "") -> list[bytes]:
        """What the keys hold, once all are there. Raises Late, or Aborted when `scope` is."""
        values = self._ask(protocol.Values, protocol.Get, tuple(keys), timeout_s, scope, True, wait_s=timeout_s)
        return list(values.values)

    def wait(self, keys: Sequence[str], timeout_s: float, scope: str = "") -> None:
        """Like `get`, for who does not need the values."""
        self._ask(protocol.Ok, protocol.Get, tuple(keys), timeout_s, scope, False, wait_s=timeout_s)

    def present(self, keys: Sequence[str]) -> list[bool]:
        return list(self._ask(protocol.Flags, protocol.Exists, tuple(keys)).flags)

    def add(self, key: str, n: int) -> int:
        """Add to a counter, which starts at 0 and is held as decimal digits; what it is then."""
        return self._ask(protocol.Number, protocol.Add, key, n).value

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key that holds `expected`, or none that is expected to be empty; what was decided for."""
        return self._ask(protocol.Values, protocol.CompareAndSet, key, expected, desired).values[0]

    def delete(self, keys: Sequence[str]) -> int:
        """How many of the keys were there."""
        return self._ask(protocol.Number, protocol.Delete, tuple(keys)).value

    def append(self, name: str, data: bytes) -> None:
        """Set `name/0`, `name/1`, ...: the next that was not appended yet. `name` itself holds their number."""
        self._ask(protocol.Ok, protocol.Append, name, data)

    def count_keys(self) -> int:
        """Of this session."""
        return self._ask(protocol.Number, protocol.CountKeys).value

    def gather(self, name: str, index: int, size: int, data: bytes, timeout_s: float, scope: str = "") -> list[bytes]:
        """The data of all `size` members in order of their indices, once all have come.

        Raises Late, and then so does everyone else: nobody was let through. Raises Aborted when `scope` is. The name
        is free again after a gather that all came to; a late one stays late until all have heard so.
        """
        values = self._ask(
            protocol.Values, protocol.Gather, name, index, size, data, timeout_s, scope, wait_s=timeout_s
        )
        return list(values.values)

    # -- scopes

    def enter(self, scope: str, who: str) -> None:
        """Take part: until `leave`, the end of this connection aborts the scope. Raises Aborted if it is aborted.

        who  "engine rank 3 (host h, process 123)", for the others when this one has gone
        """
        self._ask(protocol.Ok, protocol.Enter, scope, who)

    def leave(self, scope: str) -> None:
        with self._state:
            self._watches.pop(scope, None)
        self._ask(protocol.Ok, protocol.Leave, scope)

    def abort(self, scope: str, reason: str) -> None:
        """All who wait in the scope, now or later, raise Aborted(reason). The first reason stays."""
        self._ask(protocol.Ok, protocol.Abort, scope, reason)

    def watch(self, scope: str, then: Callable[[str], None]) -> None:
        """Call `then` once, in a thread of its own, with the reason, if the scope is aborted or the connection breaks.

        At once if either is so already. Not any more after `leave`.
        """
        with self._state:
            if (loss := self._loss) is None:
                self._watches.setdefault(scope, []).append(then)
        if loss is not None:
            _start(then, loss)
            return
        try:
            self._ask(protocol.Ok, protocol.Watch, scope)
        except Aborted as aborted:
            self._on_abort(scope, str(aborted))
        except ConnectionLost:  # `then` hears of it
            if self._closed:
                raise

    def forget(self, scope: str) -> None:
        """Let the hub drop what it knows of a scope that is over: that it was aborted, and its late gathers."""
        self._ask(protocol.Ok, protocol.Forget, scope)

    # -- the end

    def when_lost(self, then: Callable[[], None]) -> None:
        """Call `then` once, in a thread of its own, when the hub or the session ends or the connection breaks."""
        with self._state:
            if self._loss is None:
                self._losses.append(then)
                return
        _start(then)

    def end_session(self) -> None:
        """Drop the keys of this session and close its other lines."""
        self._ask(protocol.Ok, protocol.EndSession)

    def keep(self, thing: object) -> None:
        """Let it live as long as this line does."""
        self._kept.append(thing)

    def close(self) -> None:
        """Leave all scopes and hang up."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._watches, self._losses = {}, []
        with contextlib.suppress(ConnectionLost):
            self._link.ask(protocol.Disconnect, patience_s=_CLOSE_S)
        self._link.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, expected: type[T], kind: type[protocol.Request], *fields: Any, wait_s: float | None = None) -> T:
        """The reply to such a request.

        expected  the class of the reply if all is well
        wait_s    how long the hub itself may wait
        """
        patience_s = self._patience_s if wait_s is None else max(wait_s, 0.0) + GRACE_S
        reply = self._link.ask(kind, *fields, patience_s=patience_s)
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, protocol.TimedOut):
            raise WaitTimedOut(reply.missing)
        if isinstance(reply, protocol.Cancelled):
            raise Aborted(reply.reason)
        if isinstance(reply, protocol.Refused):
            raise ReshardError(f"trainer rank 0's session refused a request: {reply.message}")
        raise ReshardError(f"trainer rank 0's session answered a {kind.__name__} with a {type(reply).__name__}")

    def _on_abort(self, scope: str, reason: str) -> None:
        with self._state:
            watches = self._watches.pop(scope, [])
        for then in watches:
            _start(then, reason)

    def _on_loss(self, why: str) -> None:
        with self._state:
            if self._closed:
                return
            self._loss = why
            watches, self._watches = self._watches, {}
            losses, self._losses = self._losses, []
        for then in (then for group in watches.values() for then in group):
            _start(then, why)
        for heard in losses:
            _start(heard)


def _start(then: Callable[..., None], *said: str) -> None:
    """In a thread of its own: it may wait, and may use the line."""
    threading.Thread(target=then, args=said, name="sglang-reshard line: what follows", daemon=True).start()
