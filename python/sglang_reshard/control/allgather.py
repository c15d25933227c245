"""All-gathers: every member receives the data of all members, or none does.

An all-gather ends for all of its members at one moment: each receives everyone's data, or each learns who is missing.
That lets the ranks of an update agree on whether they continue.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_reshard.control import protocol
from sglang_reshard.control.framing import MAX_FRAME_BYTES
from sglang_reshard.control.limits import MAX_NAMES, MemoryQuota, QuotaExceeded
from sglang_reshard.control.protocol import Call
from sglang_reshard.control.scopes import is_within

CallLater = Callable[[float, Callable[[], object]], TimerHandle]


@dataclass(eq=False, slots=True)
class _AllGather:
    """One all-gather; `timed_out` once the time of a member is up.

    mark      what its scope is marked with when all have arrived; empty unless all members ask for the same
    arrived   call and data of the members that wait, by index
    missing   indices that had not arrived when it timed out
    informed  indices that have been told so
    """

    name: str
    scope: str
    size: int
    mark: str
    arrived: dict[int, tuple[Call, bytes]] = field(default_factory=dict)
    timers: list[TimerHandle] = field(default_factory=list)
    data_bytes: int = 0
    timed_out: bool = False
    missing: tuple[int, ...] = ()
    informed: set[int] = field(default_factory=set)

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()


class AllGathers:
    """The all-gathers of one session that are in progress, or that timed out and not all members know it yet."""

    def __init__(self, quota: MemoryQuota, call_later: CallLater, on_mark: Callable[[str, str], None]) -> None:
        """`on_mark` is called with scope and mark before a member learns that all have arrived."""
        self._quota, self._call_later, self._on_mark = quota, call_later, on_mark
        self._gathers: dict[str, _AllGather] = {}

    def __len__(self) -> int:
        return len(self._gathers)

    def arrive(self, call: Call, name: str, index: int, size: int, data: bytes, timeout_s: float, mark: str) -> None:
        """Raises QuotaExceeded without changing anything."""
        if not 0 <= index < size <= MAX_NAMES:
            raise QuotaExceeded(f"all-gather {name}: index {index} is out of range for {size} members")
        gather = self._gathers.get(name, _AllGather(name, call.scope, size, mark))
        if gather.size != size:
            raise QuotaExceeded(
                f"all-gather {name}: this member says there are {size} members, others say {gather.size}"
            )
        if gather.timed_out:
            self._inform(gather, index, call)
            return
        if index in gather.arrived:
            raise QuotaExceeded(f"all-gather {name}: member {index} has already sent its data")
        if gather.data_bytes + len(data) + 8 * size > MAX_FRAME_BYTES - 64:
            raise QuotaExceeded(
                f"all-gather {name}: the data of all members exceeds the limit of {MAX_FRAME_BYTES} bytes"
            )
        new = name not in self._gathers
        self._quota.take(len(data) + new * len(name), int(new))
        self._gathers[name] = gather
        gather.arrived[index] = (call, data)
        gather.mark = mark if mark == gather.mark else ""
        gather.data_bytes += len(data)
        if len(gather.arrived) == size:
            self._complete(gather)
        else:
            gather.timers.append(self._call_later(timeout_s, lambda: self._time_out(gather)))

    def cancel(self, which: Callable[[Call], bool], reason: str | None) -> None:
        """Ends the waits of some members, with `reason` if there is one; for the other members they are missing."""
        for gather in list(self._gathers.values()):
            for index, (call, data) in list(gather.arrived.items()):
                if which(call):
                    del gather.arrived[index]
                    gather.data_bytes -= len(data)
                    self._quota.take(-len(data))
                    if reason is not None:
                        call.client.send(protocol.Cancelled(call.number, reason))
            if not gather.arrived and not gather.timed_out:
                self._delete(gather)

    def delete(self, scope: str) -> None:
        """Deletes the timed-out all-gathers of a scope."""
        for gather in [g for g in self._gathers.values() if g.timed_out and is_within(g.scope, scope)]:
            self._delete(gather)

    def delete_all(self) -> None:
        for gather in list(self._gathers.values()):
            self._delete(gather)

    def _complete(self, gather: _AllGather) -> None:
        self._delete(gather)
        if gather.mark:
            self._on_mark(gather.scope, gather.mark)
        values: list[bytes | bool] = [gather.arrived[index][1] for index in range(gather.size)]
        for call, _ in gather.arrived.values():
            call.client.send(protocol.Result(call.number, values))

    def _time_out(self, gather: _AllGather) -> None:
        self._quota.take(-gather.data_bytes)
        arrived, gather.arrived, gather.data_bytes, gather.timed_out = gather.arrived, {}, 0, True
        gather.missing = tuple(index for index in range(gather.size) if index not in arrived)
        gather.cancel_timers()
        for index, (call, _) in arrived.items():
            self._inform(gather, index, call)

    def _inform(self, gather: _AllGather, index: int, call: Call) -> None:
        gather.informed.add(index)
        if len(gather.informed) == gather.size:
            self._delete(gather)
        call.client.send(protocol.TimedOut(call.number, gather.missing))

    def _delete(self, gather: _AllGather) -> None:
        if self._gathers.pop(gather.name, None) is not None:
            self._quota.take(-gather.data_bytes - len(gather.name), -1)
            gather.cancel_timers()
