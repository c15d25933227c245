"""Scopes: who participates in an update, and which updates are cancelled.

Scopes are nested by their names: the end of "update/7" is the end of "update/7/0" too, but not the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_reshard.control import protocol
from sglang_reshard.control.limits import MAX_NAME_CHARACTERS, MAX_REASON_CHARACTERS, MemoryQuota
from sglang_reshard.control.protocol import Client
from sglang_reshard.errors import Aborted


@dataclass(eq=False, slots=True)
class _Scope:
    """members: the name that each one entered with. reason: why the scope is cancelled; None while it is not"""

    members: dict[Client, str] = field(default_factory=dict)
    watchers: set[Client] = field(default_factory=set)
    reason: str | None = None


class CancelScopes:
    """The scopes of one session.

    A scope exists while it has members or watchers, and, once it is cancelled, until it is deleted.
    """

    def __init__(self, quota: MemoryQuota, on_cancel: Callable[[str, str], None]) -> None:
        """`on_cancel` is called with scope and reason."""
        self._quota, self._on_cancel = quota, on_cancel
        self._scopes: dict[str, _Scope] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    def check(self, name: str) -> None:
        """Raises Aborted with the reason if the scope, or one that it is in, is cancelled."""
        while name:
            if (scope := self._scopes.get(name)) is not None and scope.reason is not None:
                raise Aborted(scope.reason)
            name = name.rpartition("/")[0]

    def check_exists(self, name: str) -> None:
        """Raises Aborted if the scope is cancelled, or if neither it nor one that it is in exists.

        A rank that was stopped for long may be in a scope that the others have deleted since.
        """
        self.check(name)
        within = name
        while within and within not in self._scopes:
            within = within.rpartition("/")[0]
        if name and not within:
            raise Aborted(ended(name))

    def enter(self, client: Client, name: str, who: str) -> None:
        """Raises Aborted if the scope is cancelled."""
        self.check(name)
        self._scope(name).members[client] = who[:MAX_NAME_CHARACTERS]

    def watch(self, client: Client, name: str) -> None:
        """Raises Aborted if the scope is cancelled."""
        self.check(name)
        self._scope(name).watchers.add(client)

    def leave(self, client: Client, name: str) -> None:
        if (scope := self._scopes.get(name)) is None:
            return
        scope.members.pop(client, None)
        scope.watchers.discard(client)
        if not scope.members and not scope.watchers and scope.reason is None:
            self._delete(name)

    def leave_all(self, client: Client) -> None:
        for name in list(self._scopes):
            self.leave(client, name)

    def cancel(self, name: str, reason: str) -> None:
        """Cancels a scope and all that are in it. The first reason of each stays."""
        self._scope(name)
        reason = reason[:MAX_REASON_CHARACTERS]
        for within in [other for other in self._scopes if is_within(other, name)]:
            scope = self._scopes[within]
            if scope.reason is None:
                scope.reason = reason
                for client in list(scope.watchers):
                    client.send(protocol.Event(within, reason))
        self._on_cancel(name, reason)

    def disconnected(self, client: Client) -> None:
        """Cancels every scope that `client` is a member of."""
        entered = {name: scope.members[client] for name, scope in self._scopes.items() if client in scope.members}
        self.leave_all(client)
        for name, who in entered.items():
            self.cancel(name, f"{who} disconnected without leaving; was it killed? Check its log")

    def delete(self, name: str) -> None:
        """Deletes a scope and all that are in it. What still waits there is cancelled."""
        for within in [other for other in self._scopes if is_within(other, name)]:
            self._delete(within)
        self._on_cancel(name, ended(name))

    def delete_all(self) -> None:
        for name in list(self._scopes):
            self._delete(name)

    def _delete(self, name: str) -> None:
        if self._scopes.pop(name, None) is not None:
            self._quota.take(0, -1)

    def _scope(self, name: str) -> _Scope:
        if name not in self._scopes:
            self._quota.take(0, 1)
            self._scopes[name] = _Scope()
        return self._scopes[name]


def ended(name: str) -> str:
    """Returns the reason for those who still wait in a scope that is gone."""
    return f"{name} has ended without this rank; was its process stopped?"


def is_within(name: str, scope: str) -> bool:
    """Returns whether a scope is `scope`, or in it."""
    return name == scope or name.startswith(f"{scope}/")
