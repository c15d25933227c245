"""Everyone's data to everyone, or to no one.

A gather is over for all of its members in one moment: all hear everyone's data, or all hear who is missing. That
is what lets the ranks of an update agree on whether they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from sglang_reshard.control import protocol
from sglang_reshard.control.framing import MAX_FRAME_BYTES
from sglang_reshard.control.limits import MAX_NAMES, MemoryQuota, QuotaExceeded, TimerHeap


@dataclass(eq=False, slots=True)
class _Gather:
    """here: who waits, by index; missing: of a dead one, who did not come in time; told: of a dead one, who knows"""

    gathers: AllGathers
    name: str
    scope: str
    size: int
    here: dict[int, tuple[Hashable, protocol.Gather]] = field(default_factory=dict)
    data_bytes: int = 0
    missing: tuple[int, ...] = ()
    told: set[int] = field(default_factory=set)
    over: bool = False

    def expire(self) -> None:
        self.gathers.late(self)


class AllGathers:
    """The gathers of one session that are under way, or that are dead and not all who are meant know it yet."""

    def __init__(
        self,
        deliver: Callable[[Hashable, protocol.Reply | protocol.Event], None],
        budget: MemoryQuota,
        deadlines: TimerHeap,
    ) -> None:
        self._deliver, self._budget, self._deadlines = deliver, budget, deadlines
        self._gathers: dict[str, _Gather] = {}

    @property
    def known(self) -> int:
        return len(self._gathers)

    def arrive(self, member: Hashable, request: protocol.Gather, now: float) -> None:
        """Raises OverLimit for what cannot be taken in."""
        name, index = request.name, request.index
        if not 0 <= index < request.size <= MAX_NAMES:
            raise QuotaExceeded(f"gather {name}: index {index} of {request.size}")
        gather = self._gathers.get(name)
        if gather is not None and gather.size != request.size:
            raise QuotaExceeded(f"gather {name}: {request.size} members are meant here, and {gather.size} by others")
        if gather is not None and gather.over:
            self._tell(gather, index, member, request.number)
            return
        if gather is not None and index in gather.here:
            raise QuotaExceeded(f"gather {name}: index {index} has come already")
        held = 0 if gather is None else gather.data_bytes
        if held + len(request.data) + 8 * request.size > MAX_FRAME_BYTES - 64:
            raise QuotaExceeded(f"gather {name}: the data of all are more than {MAX_FRAME_BYTES} bytes")
        self._budget.take(len(request.data), int(gather is None))
        if gather is None:
            gather = self._gathers[name] = _Gather(self, name, request.scope, request.size)
        gather.here[index] = (member, request)
        gather.data_bytes += len(request.data)
        if len(gather.here) == gather.size:
            self._complete(gather)
        else:
            self._deadlines.add(now, request.timeout_s, gather)

    def late(self, gather: _Gather) -> None:
        """The time of one member is up."""
        gather.missing = tuple(index for index in range(gather.size) if index not in gather.here)
        here = gather.here
        self._empty(gather)
        for index, (member, request) in here.items():
            self._tell(gather, index, member, request.number)

    def give_up(self, which: Callable[[Hashable, protocol.Gather], bool], reason: str | None) -> None:
        """Some do not wait any more: they are told `reason`, if there is one, and to the others they did not come."""
        for gather in list(self._gathers.values()):
            for index, (member, request) in list(gather.here.items()):
                if which(member, request):
                    del gather.here[index]
                    gather.data_bytes -= len(request.data)
                    self._budget.take(-len(request.data))
                    if reason is not None:
                        self._deliver(member, protocol.Cancelled(request.number, reason))
            if not gather.here and not gather.over:
                gather.over = True
                self._drop(gather)

    def forget(self, scope: str) -> None:
        """Drop the dead gathers of a scope."""
        for gather in [g for g in self._gathers.values() if g.over and g.scope == scope]:
            self._drop(gather)

    def drop_all(self) -> None:
        for gather in list(self._gathers.values()):
            self._empty(gather)
            self._drop(gather)

    def _complete(self, gather: _Gather) -> None:
        here = gather.here
        self._empty(gather)
        self._drop(gather)
        values = tuple(here[index][1].data for index in range(gather.size))
        for member, request in here.values():
            self._deliver(member, protocol.Values(request.number, values))

    def _tell(self, gather: _Gather, index: int, member: Hashable, number: int) -> None:
        gather.told.add(index)
        if len(gather.told) == gather.size:
            self._drop(gather)
        self._deliver(member, protocol.TimedOut(number, gather.missing))

    def _empty(self, gather: _Gather) -> None:
        self._budget.take(-gather.data_bytes)
        gather.here, gather.data_bytes, gather.over = {}, 0, True

    def _drop(self, gather: _Gather) -> None:
        if self._gathers.pop(gather.name, None) is not None:
            self._budget.take(0, -1)
