"""What a hub knows of one session: keys, gathers, scopes, and who waits for which. No input and output here.

Every request is answered through `deliver`, at once or when what it waits for comes about.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from sglang_reshard.control import protocol
from sglang_reshard.control.allgather import AllGathers
from sglang_reshard.control.framing import MAX_FRAME_BYTES
from sglang_reshard.control.limits import MAX_WAITS, MemoryQuota, QuotaExceeded, TimerHeap, check_name
from sglang_reshard.control.scopes import CancelScopes

Member = Hashable
Deliver = Callable[[Member, protocol.Reply | protocol.Event], None]

_INT64 = 2**63


@dataclass(eq=False, slots=True)
class _Wait:
    """A `Get` that waits for the keys `missing`."""

    board: SessionStore
    member: Member
    request: protocol.Get
    missing: set[str]
    over: bool = False

    def expire(self) -> None:
        self.board.late(self)


class SessionStore:
    """One session. `member` is whoever sent a request; the same one means the same connection."""

    def __init__(self, deliver: Deliver, budget: MemoryQuota, deadlines: TimerHeap) -> None:
        self._deliver, self._budget, self._deadlines = deliver, budget, deadlines
        self._values: dict[str, bytes] = {}
        self._waits: set[_Wait] = set()
        self._wanted: dict[str, set[_Wait]] = {}
        self._busy: dict[Member, int] = {}  # how many waits each member has
        self._scopes = CancelScopes(self._aborted, deliver, budget)
        self._gathers = AllGathers(deliver, budget, deadlines)
        self._handlers: dict[type, Callable[[Member, Any, float], None]] = {
            protocol.Set: self._set,
            protocol.Get: self._get,
            protocol.Exists: self._present,
            protocol.Add: self._add,
            protocol.CompareAndSet: self._swap,
            protocol.Delete: self._delete,
            protocol.Append: self._append,
            protocol.CountKeys: self._count_keys,
            protocol.Gather: self._gather,
            protocol.Enter: self._enter,
            protocol.Leave: self._leave,
            protocol.Abort: self._abort,
            protocol.Watch: self._watch,
            protocol.Forget: self._forget,
            protocol.Disconnect: self._bye,
        }

    @property
    def empty(self) -> bool:
        return not (self._values or self._scopes.known or self._gathers.known)

    def take(self, member: Member, request: protocol.Request, now: float) -> None:
        """`now` in seconds of a monotonic clock."""
        try:
            self._handlers[type(request)](member, request, now)
        except QuotaExceeded as error:
            self._deliver(member, protocol.Refused(request.number, str(error)))

    def gone(self, member: Member) -> None:
        """The connection of `member` broke: abort what it is in."""
        self._give_up(lambda who, _: who == member, None)
        self._scopes.gone(member)

    def end(self, member: Member) -> None:
        """Drop everything, as `member` wishes; of those who wait only it is answered, the others will be cut off."""
        self._give_up(lambda who, _: who == member, "the session was ended")
        for wait in list(self._waits):
            self._finish(wait)
        self._gathers.drop_all()
        self._scopes.drop_all()
        self._remove(list(self._values))

    # -- keys

    def _set(self, member: Member, request: protocol.Set, now: float) -> None:
        check_name(*request.items)
        self._put(request.items)
        self._deliver(member, protocol.Ok(request.number))

    def _put(self, items: dict[str, bytes]) -> None:
        grown = sum(len(value) - len(self._values.get(key, b"")) for key, value in items.items())
        self._budget.take(grown, sum(key not in self._values for key in items))
        self._values.update(items)
        for key in items.keys() & self._wanted.keys():
            for wait in self._wanted.pop(key):
                wait.missing.discard(key)
                if not wait.missing:
                    self._look_again(wait)

    def _remove(self, keys: list[str]) -> int:
        held = [self._values.pop(key) for key in keys if key in self._values]
        self._budget.take(-sum(map(len, held)), -len(held))
        return len(held)

    def _get(self, member: Member, request: protocol.Get, now: float) -> None:
        if (reason := self._scopes.reason(request.scope)) is not None:
            self._deliver(member, protocol.Cancelled(request.number, reason))
            return
        check_name(request.scope)
        wait = _Wait(self, member, request, {key for key in request.keys if key not in self._values})
        if not wait.missing:
            self._answer(wait)
            return
        check_name(*wait.missing)
        if self._busy.get(member, 0) >= MAX_WAITS:
            raise QuotaExceeded(f"more than {MAX_WAITS} waits of one connection at a time")
        self._busy[member] = self._busy.get(member, 0) + 1
        self._waits.add(wait)
        self._want(wait)
        self._deadlines.add(now, request.timeout_s, wait)

    def _want(self, wait: _Wait) -> None:
        for key in wait.missing:
            self._wanted.setdefault(key, set()).add(wait)

    def _look_again(self, wait: _Wait) -> None:
        """All keys have been seen; one may have been deleted since."""
        wait.missing = {key for key in wait.request.keys if key not in self._values}
        if wait.missing:
            self._want(wait)
        else:
            self._finish(wait)
            self._answer(wait)

    def _answer(self, wait: _Wait) -> None:
        request = wait.request
        if not request.values:
            self._deliver(wait.member, protocol.Ok(request.number))
            return
        values = tuple(self._values[key] for key in request.keys)
        reply: protocol.Reply = protocol.Values(request.number, values)
        if (size := sum(map(len, values)) + 8 * len(values)) > MAX_FRAME_BYTES - 64:
            message = f"{size} bytes in one answer, and at most {MAX_FRAME_BYTES} are carried: ask for less at a time"
            reply = protocol.Refused(request.number, message)
        self._deliver(wait.member, reply)

    def _finish(self, wait: _Wait) -> None:
        wait.over = True
        self._waits.discard(wait)
        self._busy[wait.member] -= 1
        if not self._busy[wait.member]:
            del self._busy[wait.member]
        for key in wait.missing:
            if waiting := self._wanted.get(key):
                waiting.discard(wait)
                if not waiting:
                    del self._wanted[key]

    def late(self, wait: _Wait) -> None:
        """The time of `wait` is up."""
        self._finish(wait)
        keys = wait.request.keys
        missing = tuple(number for number, key in enumerate(keys) if key not in self._values)
        self._deliver(wait.member, protocol.TimedOut(wait.request.number, missing))

    def _present(self, member: Member, request: protocol.Exists, now: float) -> None:
        self._deliver(member, protocol.Flags(request.number, tuple(key in self._values for key in request.keys)))

    def _add(self, member: Member, request: protocol.Add, now: float) -> None:
        self._deliver(member, protocol.Number(request.number, self._count(request.key, request.n)))

    def _count(self, key: str, n: int) -> int:
        check_name(key)
        try:
            value = int(self._values.get(key, b"0")) + n
        except ValueError:
            raise QuotaExceeded(f"{key} is not a counter: something else was set") from None
        if not -_INT64 <= value < _INT64:
            raise QuotaExceeded(f"{key} would be {value}, and counters have 64 bits")
        self._put({key: b"%d" % value})
        return value

    def _swap(self, member: Member, request: protocol.CompareAndSet, now: float) -> None:
        check_name(request.key)
        held = self._values.get(request.key)
        if held == request.expected or (held is None and not request.expected):
            self._put({request.key: request.desired})
            held = request.desired
        self._deliver(member, protocol.Values(request.number, (request.expected if held is None else held,)))

    def _delete(self, member: Member, request: protocol.Delete, now: float) -> None:
        self._deliver(member, protocol.Number(request.number, self._remove(list(request.keys))))

    def _append(self, member: Member, request: protocol.Append, now: float) -> None:
        number = self._count(request.name, 1) - 1
        try:
            check_name(key := f"{request.name}/{number}")
            self._put({key: request.data})
        except QuotaExceeded:
            self._count(request.name, -1)
            raise
        self._deliver(member, protocol.Ok(request.number))

    def _count_keys(self, member: Member, request: protocol.CountKeys, now: float) -> None:
        self._deliver(member, protocol.Number(request.number, len(self._values)))

    # -- gathers and scopes

    def _gather(self, member: Member, request: protocol.Gather, now: float) -> None:
        if (reason := self._scopes.reason(request.scope)) is not None:
            self._deliver(member, protocol.Cancelled(request.number, reason))
            return
        check_name(request.name, request.scope)
        self._gathers.arrive(member, request, now)

    def _enter(self, member: Member, request: protocol.Enter, now: float) -> None:
        check_name(request.scope)
        self._tell(member, request.number, self._scopes.enter(member, request.scope, request.who))

    def _watch(self, member: Member, request: protocol.Watch, now: float) -> None:
        check_name(request.scope)
        self._tell(member, request.number, self._scopes.watch(member, request.scope))

    def _tell(self, member: Member, number: int, reason: str | None) -> None:
        self._deliver(member, protocol.Ok(number) if reason is None else protocol.Cancelled(number, reason))

    def _leave(self, member: Member, request: protocol.Leave, now: float) -> None:
        self._scopes.leave(member, request.scope)
        self._deliver(member, protocol.Ok(request.number))

    def _abort(self, member: Member, request: protocol.Abort, now: float) -> None:
        check_name(request.scope)
        self._scopes.abort(request.scope, request.reason)
        self._deliver(member, protocol.Ok(request.number))

    def _aborted(self, scope: str, reason: str) -> None:
        self._give_up(lambda _, request: request.scope == scope, reason)

    def _give_up(self, which: Callable[[Member, protocol.Get | protocol.Gather], bool], reason: str | None) -> None:
        """End waits; those that wait are told `reason`, if there is one."""
        for wait in [wait for wait in self._waits if which(wait.member, wait.request)]:
            self._finish(wait)
            if reason is not None:
                self._deliver(wait.member, protocol.Cancelled(wait.request.number, reason))
        self._gathers.give_up(which, reason)

    def _forget(self, member: Member, request: protocol.Forget, now: float) -> None:
        self._scopes.forget(request.scope)
        self._gathers.forget(request.scope)
        self._deliver(member, protocol.Ok(request.number))

    def _bye(self, member: Member, request: protocol.Disconnect, now: float) -> None:
        self._give_up(lambda who, _: who == member, None)
        self._scopes.leave_all(member)
        self._deliver(member, protocol.Ok(request.number))
