"""The state of one session on the control server: keys, all-gathers, and the requests that wait for them.

An all-gather ends for all of its members at one moment: each receives everyone's data, or each learns who is missing.
That lets the ranks of an update agree on whether they continue.

Nothing here does input or output: requests come in through `execute`, replies go out through the `Client`.
"""

from __future__ import annotations

import logging
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_reshard.control import protocol
from sglang_reshard.control.connection import MAX_FRAME_BYTES
from sglang_reshard.control.protocol import DEFERRED, Call, Client, Event, QuotaExceeded, operation
from sglang_reshard.control.scopes import MAX_NAME_CHARACTERS, CancelScopes, Take, is_within
from sglang_reshard.errors import Aborted

logger = logging.getLogger(__name__)
MAX_WAITS = 4096  # of one connection at a time
_MAX_MEMBERS = 1_000_000  # of an all-gather
_MAX_REPLY_BYTES = 64  # of a reply, without its values
_INT64 = 2**63

CallLater = Callable[[float, Callable[[], object]], TimerHandle]


@dataclass(eq=False, slots=True)
class _Get:
    """A `get` that waits for the keys `missing`."""

    call: Call
    keys: tuple[str, ...]
    with_values: bool
    missing: set[str]


@dataclass(eq=False, slots=True)
class _AllGather:
    """An all-gather in progress, or one that timed out and not all members know it yet.

    mark      what its scope is marked with when all have arrived; empty unless all members ask for the same
    arrived   call and data of the members that wait, by index
    missing   indices that had not arrived when it timed out; None if it has not
    informed  indices that have been told so
    """

    name: str
    scope: str
    size: int
    mark: str
    arrived: dict[int, tuple[Call, bytes]] = field(default_factory=dict)
    data_bytes: int = 0
    missing: tuple[int, ...] | None = None
    informed: set[int] = field(default_factory=set)


def execute(owner: object, call: Call, name: str, arguments: tuple[Any, ...]) -> None:
    """Executes an operation of `owner`. Replies to the client, unless that is deferred or nobody waits for it."""
    reply: protocol.Reply
    try:
        value = getattr(owner, name)(call, *arguments)
        if value is DEFERRED:
            return
        reply = protocol.Result(call.number, value)
    except QuotaExceeded as error:
        reply = protocol.Refused(call.number, str(error))
    except Aborted as error:
        reply = protocol.Cancelled(call.number, str(error))
    if call.number >= 0 or not isinstance(reply, protocol.Result):
        call.client.send(reply)


def check_name(*names: str) -> None:
    """Raises QuotaExceeded for a name that is too long."""
    for name in names:
        if len(name) > MAX_NAME_CHARACTERS:
            raise QuotaExceeded(
                f"the name {name[:80]}... has {len(name)} characters; the limit is {MAX_NAME_CHARACTERS}"
            )


class SessionStore:
    """One session. Its operations have the names and meanings of torch.distributed.Store's where it has them."""

    def __init__(self, take: Take, call_later: CallLater) -> None:
        """`call_later(seconds, function)` is an event loop's."""
        self._take, self._call_later = take, call_later
        self._values: dict[str, bytes] = {}
        self._gets: dict[str, set[_Get]] = {}  # by missing key
        self._gathers: dict[str, _AllGather] = {}
        self._waits: Counter[Client] = Counter()
        self._scopes = CancelScopes(take, lambda scope, why: self._cancel(lambda c: is_within(c.scope, scope), why))

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
        for gather in list(self._gathers.values()):
            self._delete_gather(gather)
        self._scopes.delete_all()
        self._delete(tuple(self._values))

    # -- keys

    @operation
    def set(self, call: Call, items: dict[str, bytes]) -> None:
        check_name(*items)
        self._set(items)

    @operation
    def get(self, call: Call, keys: tuple[str, ...], timeout_s: float, scope: str, with_values: bool) -> object:
        """Results in the keys' values, once all are set, or in nothing."""
        self._check_may_wait(call, scope)
        get = _Get(call, keys, with_values, {key for key in keys if key not in self._values})
        if get.missing:
            check_name(*get.missing)
            self._add_get(get)
            self._begin_wait(call, timeout_s, lambda: self._time_out_get(get))
        else:
            self._answer_get(get)
        return DEFERRED

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
        check_name(name, mark)
        self._check_may_wait(call, scope)
        if mark:
            self._scopes.check_markable(scope)
        if not 0 <= index < size <= _MAX_MEMBERS:
            raise QuotaExceeded(f"all-gather {name}: index {index} is out of range for {size} members")
        gather = self._gathers.get(name, _AllGather(name, scope, size, mark))
        if gather.size != size:
            raise QuotaExceeded(
                f"all-gather {name}: this member says there are {size} members, others say {gather.size}"
            )
        if gather.missing is not None:
            self._inform(gather, index, call)
            return DEFERRED
        if index in gather.arrived:
            raise QuotaExceeded(f"all-gather {name}: member {index} has already sent its data")
        if gather.data_bytes + len(data) + 8 * size > MAX_FRAME_BYTES - _MAX_REPLY_BYTES:
            raise QuotaExceeded(
                f"all-gather {name}: the data of all members exceeds the limit of {MAX_FRAME_BYTES} bytes"
            )
        new = name not in self._gathers
        self._take(len(data) + new * len(name), int(new))
        self._gathers[name] = gather
        gather.arrived[index] = (call, data)
        gather.mark = mark if mark == gather.mark else ""
        gather.data_bytes += len(data)
        self._begin_wait(call, timeout_s, lambda: self._time_out_gather(gather))
        if len(gather.arrived) == size:
            self._complete(gather)
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
        for gather in [g for g in self._gathers.values() if g.missing is not None and is_within(g.scope, scope)]:
            self._delete_gather(gather)

    @operation
    def disconnect(self, call: Call) -> None:
        """Leaves all scopes, so that the end of the connection cancels none."""
        self._cancel(lambda other: other.client is call.client, None)
        self._scopes.leave_all(call.client)

    # -- waits

    def _check_may_wait(self, call: Call, scope: str) -> None:
        check_name(scope)
        self._scopes.check_exists(scope)
        if self._waits[call.client] >= MAX_WAITS:
            raise QuotaExceeded(f"one connection has more than {MAX_WAITS} pending waits")
        call.scope = scope

    def _begin_wait(self, call: Call, timeout_s: float, time_out: Callable[[], None]) -> None:
        self._waits[call.client] += 1
        call.timer = self._call_later(max(0.0, timeout_s), time_out)  # 0 for NaN too

    def _end_wait(self, call: Call) -> None:
        if call.timer is None:
            return
        call.timer.cancel()
        self._waits[call.client] -= 1
        if not self._waits[call.client]:
            del self._waits[call.client]

    def _cancel(self, which: Callable[[Call], bool], reason: str | None) -> None:
        """Ends some waits, with `reason` if there is one. For the others of an all-gather these members are missing."""
        ended = []
        for get in {get for gets in self._gets.values() for get in gets if which(get.call)}:
            self._remove_get(get)
            ended.append(get.call)
        for gather in list(self._gathers.values()):
            for index, (call, data) in list(gather.arrived.items()):
                if which(call):
                    del gather.arrived[index]
                    gather.data_bytes -= len(data)
                    self._take(-len(data))
                    ended.append(call)
            if not gather.arrived and gather.missing is None:
                self._delete_gather(gather)
        for call in ended:
            self._end_wait(call)
            if reason is not None:
                call.client.send(protocol.Cancelled(call.number, reason))

    # -- those of gets

    def _add_get(self, get: _Get) -> None:
        for key in get.missing:
            self._gets.setdefault(key, set()).add(get)

    def _remove_get(self, get: _Get) -> None:
        for key in get.missing:
            self._gets[key].discard(get)
            if not self._gets[key]:
                del self._gets[key]

    def _time_out_get(self, get: _Get) -> None:
        self._remove_get(get)
        self._end_wait(get.call)
        missing = tuple(index for index, key in enumerate(get.keys) if key not in self._values)
        get.call.client.send(protocol.TimedOut(get.call.number, missing))

    def _answer_get(self, get: _Get) -> None:
        self._end_wait(get.call)
        number, values = get.call.number, [self._values[key] for key in get.keys] if get.with_values else []
        reply: protocol.Reply = protocol.Result(number, [*values] if get.with_values else None)
        if (size := sum(len(value) + 8 for value in values)) > MAX_FRAME_BYTES - _MAX_REPLY_BYTES:
            message = (
                f"the values of one `get` have {size} bytes, more than the limit of {MAX_FRAME_BYTES}; request fewer "
                "keys"
            )
            reply = protocol.Refused(number, message)
        get.call.client.send(reply)

    # -- those of all-gathers

    def _complete(self, gather: _AllGather) -> None:
        self._delete_gather(gather)
        if gather.mark:
            self._scopes.set_mark(gather.scope, gather.mark)
        values: list[bytes | bool] = [gather.arrived[index][1] for index in range(gather.size)]
        for call, _ in gather.arrived.values():
            self._end_wait(call)
            call.client.send(protocol.Result(call.number, values))

    def _time_out_gather(self, gather: _AllGather) -> None:
        self._take(-gather.data_bytes)
        arrived, gather.arrived, gather.data_bytes = gather.arrived, {}, 0
        gather.missing = tuple(index for index in range(gather.size) if index not in arrived)
        for index, (call, _) in arrived.items():
            self._end_wait(call)
            self._inform(gather, index, call)

    def _inform(self, gather: _AllGather, index: int, call: Call) -> None:
        assert gather.missing is not None
        gather.informed.add(index)
        if len(gather.informed) == gather.size:
            self._delete_gather(gather)
        call.client.send(protocol.TimedOut(call.number, gather.missing))

    def _delete_gather(self, gather: _AllGather) -> None:
        if self._gathers.pop(gather.name, None) is not None:
            self._take(-gather.data_bytes - len(gather.name), -1)

    # -- values

    def _set(self, items: dict[str, bytes]) -> None:
        grown = new = 0
        for key, value in items.items():
            old = self._values.get(key)
            grown += len(value) + len(key) if old is None else len(value) - len(old)
            new += old is None
        self._take(grown, new)
        self._values.update(items)
        for key in items.keys() & self._gets.keys():
            for get in self._gets.pop(key):
                get.missing.discard(key)
                if get.missing:
                    continue
                get.missing = {key for key in get.keys if key not in self._values}  # deleted since
                if get.missing:
                    self._add_get(get)
                else:
                    self._answer_get(get)

    def _delete(self, keys: tuple[str, ...]) -> int:
        deleted = {key: self._values.pop(key) for key in keys if key in self._values}
        self._take(-sum(len(key) + len(value) for key, value in deleted.items()), -len(deleted))
        return len(deleted)
