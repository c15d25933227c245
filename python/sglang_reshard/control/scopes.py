"""Who takes part in what, and what has been given up."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from sglang_reshard.control import protocol
from sglang_reshard.control.limits import MAX_NAME_CHARACTERS, MAX_REASON_CHARACTERS, MemoryQuota


@dataclass(eq=False, slots=True)
class _Scope:
    """inside: who each member says it is; reason: why the scope was aborted, None as long as it was not"""

    inside: dict[Hashable, str] = field(default_factory=dict)
    watchers: set[Hashable] = field(default_factory=set)
    reason: str | None = None


class CancelScopes:
    """The scopes of one session. One is known while somebody is in it or watches it, and once it is aborted."""

    def __init__(
        self,
        then: Callable[[str, str], None],
        deliver: Callable[[Hashable, protocol.Reply | protocol.Event], None],
        budget: MemoryQuota,
    ) -> None:
        """`then` hears scope and reason of what is aborted."""
        self._then, self._deliver, self._budget = then, deliver, budget
        self._scopes: dict[str, _Scope] = {}

    @property
    def known(self) -> int:
        return len(self._scopes)

    def reason(self, name: str) -> str | None:
        scope = self._scopes.get(name)
        return None if scope is None else scope.reason

    def enter(self, member: Hashable, name: str, who: str) -> str | None:
        """None, or why the scope is aborted already."""
        if (reason := self.reason(name)) is None:
            self._scope(name).inside[member] = who[:MAX_NAME_CHARACTERS]
        return reason

    def watch(self, member: Hashable, name: str) -> str | None:
        """None, or why the scope is aborted already."""
        if (reason := self.reason(name)) is None:
            self._scope(name).watchers.add(member)
        return reason

    def leave(self, member: Hashable, name: str) -> None:
        if (scope := self._scopes.get(name)) is None:
            return
        scope.inside.pop(member, None)
        scope.watchers.discard(member)
        if not scope.inside and not scope.watchers and scope.reason is None:
            self.forget(name)

    def leave_all(self, member: Hashable) -> None:
        for name in list(self._scopes):
            self.leave(member, name)

    def abort(self, name: str, reason: str) -> None:
        """The first reason stays."""
        scope = self._scope(name)
        if scope.reason is not None:
            return
        scope.reason = reason[:MAX_REASON_CHARACTERS]
        for member in list(scope.watchers):
            self._deliver(member, protocol.ScopeAborted(name, scope.reason))
        self._then(name, scope.reason)

    def gone(self, member: Hashable) -> None:
        """The connection of `member` broke."""
        entered = {name: scope.inside[member] for name, scope in self._scopes.items() if member in scope.inside}
        self.leave_all(member)
        for name, who in entered.items():
            self.abort(name, f"{who} has gone: its connection broke; was it killed? Look at its log")

    def forget(self, name: str) -> None:
        if self._scopes.pop(name, None) is not None:
            self._budget.take(0, -1)

    def drop_all(self) -> None:
        for name in list(self._scopes):
            self.forget(name)

    def _scope(self, name: str) -> _Scope:
        if name not in self._scopes:
            self._budget.take(0, 1)
            self._scopes[name] = _Scope()
        return self._scopes[name]
