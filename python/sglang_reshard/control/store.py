"""The state of one session on the control server: keys, all-gathers, scopes, and the requests that wait for them.

It does no input or output itself: requests come in through `protocol.execute`, replies go out through the `Client`.
"""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sglang_reshard.control import protocol
from sglang_reshard.control.allgather import AllGathers, CallLater
from sglang_reshard.control.framing import MAX_FRAME_BYTES
from sglang_reshard.control.limits import MAX_WAITS, MemoryQuota, QuotaExceeded, check_name
from sglang_reshard.control.protocol import DEFERRED, Call, Client, Event, operation
from sglang_reshard.control.scopes import CancelScopes, is_within
from sglang_reshard.errors import Aborted

logger = logging.getLogger(__name__)
_INT64 = 2**63


@dataclass(eq=False, slots=True)
class _Wait:
    """A `get`, or a `wait` if not `with_values`, that waits for the keys `missing`."""

    call: Call
    keys: tuple[str, ...]
    with_values: bool
    missing: set[str]
    timer: TimerHandle | None = None


class SessionStore:
    """One session. Its operations have the names and meanings of torch.distributed.Store's where it has them."""

    def __init__(self, quota: MemoryQuota, call_later: CallLater) -> None:
        """`call_later(seconds, function)` is an event loop's."""
        self._quota, self._call_later = quota, call_later
        self._values: dict[str, bytes] = {}
        self._waits: dict[str, set[_Wait]] = {}  # by missing key
        self._waits_of: Counter[Client] = Counter()
        self._scopes = CancelScopes(quota, lambda scope, why: self._cancel(lambda c: is_within(c.scope, scope), why))
        self._gathers = AllGathers(quota, call_later, self._scopes.set_mark)

    @property
    def empty(self) -> bool:
        return not (self._values or self._scopes or self._gathers)

    def who(self, client: Client) -> str:
        """Returns the names with which a client has entered scopes; empty if it is in none."""
        return self._scopes.who(client)

    def disconnected(self, client: Client) -> None:
        """Ends the waits of `client` and cancels the scopes that it is a member of."""
        self._cancel(lambda call: call.client is client, None)
        self._scopes.disconnected(client)

    def end(self, client: Client) -> None:
        """Deletes everything for `client`; of the waits only its own are replied to, other clients are disconnected."""
        self._cancel(lambda call: call.client is client, "the session has ended")
        self._cancel(lambda call: True, None)
        self._gathers.delete_all()
        self._scopes.delete_all()
        self._delete(tuple(self._values))

    # -- keys

    @operation
    def set(self, call: Call, items: dict[str, bytes]) -> None:
        check_name(*items)
        self._set(items)

    @operation
    def get(self, call: Call, keys: tuple[str, ...], timeout_s: float, scope: str) -> object:
        """Results in the keys' values, once all are set."""
        return self._wait(call, keys, timeout_s, scope, with_values=True)

    @operation
    def wait(self, call: Call, keys: tuple[str, ...], timeout_s: float, scope: str) -> object:
        """Like `get`, without the values."""
        return self._wait(call, keys, timeout_s, scope, with_values=False)

    @operation
    def exists(self, call: Call, keys: tuple[str, ...]) -> list[bool]:
        return [key in self._values for key in keys]

    @operation
    def add(self, call: Call, key: str, n: int) -> int:
        check_name(key)
        try:
            value = int(self._values.get(key, b"0")) + n
        except ValueError:
            raise QuotaExceeded(f"{key} is not a counter: its value is not an integer") from None
        if not -_INT64 <= value < _INT64:
            raise QuotaExceeded(f"{key} would become {value}, which does not fit into 64 bits")
        self._set({key: b"%d" % value})
        return value

    @operation
    def compare_set(self, call: Call, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets `key` if it holds `expected`, or if it is missing and `expected` is empty."""
        check_name(key)
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self._set({key: desired})
            return desired
        return expected if value is None else value

    @operation
    def append(self, call: Call, name: str, data: bytes, once: str) -> None:
        """Appends nothing if `once` is a key that is set, and sets it otherwise."""
        if once in self._values:
            return
        number = self.add(call, name, 1) - 1
        try:
            check_name(key := f"{name}/{number}", once)
            self._set({key: data, once: b""} if once else {key: data})
        except QuotaExceeded:
            self.add(call, name, -1)
            raise

    @operation
    def delete_keys(self, call: Call, keys: tuple[str, ...]) -> int:
        return self._delete(keys)

    @operation
    def delete_prefix(self, call: Call, prefix: str) -> int:
        return self._delete(tuple(key for key in self._values if key.startswith(prefix)))

    @operation
    def num_keys(self, call: Call) -> int:
        return len(self._values)

    # -- all-gathers and scopes

    @operation
    def all_gather(
        self, call: Call, name: str, index: int, size: int, data: bytes, timeout_s: float, scope: str, mark: str
    ) -> object:
        check_name(name, scope, mark)
        self._scopes.check_exists(scope)
        if mark:
            self._scopes.check_markable(scope)
        call.scope = scope
        self._gathers.arrive(call, name, index, size, data, _seconds(timeout_s), mark)
        return DEFERRED

    @operation
    def enter(self, call: Call, scope: str, who: str, within: str) -> None:
        check_name(scope, within)
        self._scopes.enter(call.client, scope, who, within)

    @operation
    def leave(self, call: Call, scope: str) -> None:
        self._scopes.leave(call.client, scope)

    @operation
    def watch(self, call: Call, scope: str) -> None:
        """Tells the client at once if the scope is cancelled already."""
        check_name(scope)
        try:
            self._scopes.watch(call.client, scope)
        except Aborted as aborted:
            call.client.send(Event(scope, str(aborted)))

    @operation
    def cancel(self, call: Call, scope: str, reason: str) -> None:
        check_name(scope)
        if not self._scopes.takes_part(call.client, scope):
            logger.info("%s was cancelled by %s: %s", scope, self.who(call.client) or "one who is in no scope", reason)
        self._scopes.cancel(scope, reason)

    @operation
    def revoke(self, call: Call, scope: str, reason: str) -> list[bytes]:
        """Results in the scope's mark, why it is cancelled, and its number of members."""
        check_name(scope)
        mark, why, members = self._scopes.revoke(scope, reason)
        return [mark.encode(), why.encode(), b"%d" % members]

    @operation
    def end_scope(self, call: Call, scope: str) -> None:
        check_name(scope)
        self._scopes.end(scope)

    @operation
    def delete_scope(self, call: Call, scope: str) -> None:
        """Deletes also the keys whose names begin with the scope's and a slash."""
        self.delete_prefix(call, f"{scope}/")
        self._scopes.delete(scope)
        self._gathers.delete(scope)

    @operation
    def disconnect(self, call: Call) -> None:
        """Leaves all scopes, so that the end of the connection cancels none."""
        self._cancel(lambda other: other.client is call.client, None)
        self._scopes.leave_all(call.client)

    # -- waits

    def _wait(self, call: Call, keys: tuple[str, ...], timeout_s: float, scope: str, with_values: bool) -> object:
        check_name(scope)
        self._scopes.check_exists(scope)
        call.scope = scope
        wait = _Wait(call, keys, with_values, {key for key in keys if key not in self._values})
        if not wait.missing:
            self._reply(wait)
            return DEFERRED
        check_name(*wait.missing)
        if self._waits_of[call.client] >= MAX_WAITS:
            raise QuotaExceeded(f"one connection has more than {MAX_WAITS} pending waits")
        self._waits_of[call.client] += 1
        self._add_wait(wait)
        wait.timer = self._call_later(_seconds(timeout_s), lambda: self._time_out(wait))
        return DEFERRED

    def _add_wait(self, wait: _Wait) -> None:
        for key in wait.missing:
            self._waits.setdefault(key, set()).add(wait)

    def _end_wait(self, wait: _Wait) -> None:
        if wait.timer is not None:
            wait.timer.cancel()
        self._waits_of[wait.call.client] -= 1
        if not self._waits_of[wait.call.client]:
            del self._waits_of[wait.call.client]
        for key in wait.missing:
            self._waits[key].discard(wait)
            if not self._waits[key]:
                del self._waits[key]

    def _time_out(self, wait: _Wait) -> None:
        self._end_wait(wait)
        missing = tuple(index for index, key in enumerate(wait.keys) if key not in self._values)
        wait.call.client.send(protocol.TimedOut(wait.call.number, missing))

    def _cancel(self, which: Callable[[Call], bool], reason: str | None) -> None:
        """Ends some waits, with `reason` if there is one."""
        for wait in {wait for waits in self._waits.values() for wait in waits if which(wait.call)}:
            self._end_wait(wait)
            if reason is not None:
                wait.call.client.send(protocol.Cancelled(wait.call.number, reason))
        self._gathers.cancel(which, reason)

    def _reply(self, wait: _Wait) -> None:
        reply: protocol.Reply = protocol.Result(wait.call.number, None)
        if wait.with_values:
            values: list[bytes | bool] = [self._values[key] for key in wait.keys]
            reply = protocol.Result(wait.call.number, values)
            if (size := sum(len(self._values[key]) + 8 for key in wait.keys)) > MAX_FRAME_BYTES - 64:
                message = (
                    f"the values of one `get` have {size} bytes, more than the limit of {MAX_FRAME_BYTES}; request "
                    "fewer keys"
                )
                reply = protocol.Refused(wait.call.number, message)
        wait.call.client.send(reply)

    # -- values

    def _set(self, items: dict[str, bytes]) -> None:
        grown = new = 0
        for key, value in items.items():
            old = self._values.get(key)
            grown += len(value) + len(key) if old is None else len(value) - len(old)
            new += old is None
        self._quota.take(grown, new)
        self._values.update(items)
        for key in items.keys() & self._waits.keys():
            for wait in self._waits.pop(key):
                wait.missing.discard(key)
                if not wait.missing:
                    self._check_again(wait)

    def _check_again(self, wait: _Wait) -> None:
        """All keys have been set once; one may have been deleted since."""
        wait.missing = {key for key in wait.keys if key not in self._values}
        if wait.missing:
            self._add_wait(wait)
        else:
            self._end_wait(wait)
            self._reply(wait)

    def _delete(self, keys: tuple[str, ...]) -> int:
        deleted = {key: self._values.pop(key) for key in keys if key in self._values}
        self._quota.take(-sum(len(key) + len(value) for key, value in deleted.items()), -len(deleted))
        return len(deleted)


def _seconds(timeout_s: float) -> float:
    return max(0.0, timeout_s)  # 0 for NaN too
