"""Scopes: who participates in an update, which updates are cancelled, and which have come too far for that.

Scopes are nested by their names: the end of "update/7" is the end of "update/7/0" too, but not the other way round.

A scope has a mark as soon as all members of an all-gather have asked for it. To find out whether that has happened, or
to prevent it, a client revokes the scope: either it has a mark, or it will never have one. Both are decided here, in
one thread, so that nobody can be told one thing and do the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_reshard.control import protocol
from sglang_reshard.control.protocol import Client, QuotaExceeded
from sglang_reshard.errors import Aborted

MAX_NAME_CHARACTERS = 1024
_MAX_REASON_CHARACTERS = 64 * 1024
_REMEMBERED = 4096  # scopes that are deleted, for members that were disconnected
_NAMES_IN_USE = 64  # of scopes that are looked up again and again: those of one update

Take = Callable[..., None]  # `server.MemoryQuota.take`


@dataclass(eq=False, slots=True)
class _Scope:
    """members: the name that each one entered with. reason: why the scope is cancelled; None while it is not"""

    members: dict[Client, str] = field(default_factory=dict)
    watchers: set[Client] = field(default_factory=set)
    reason: str | None = None
    mark: str = ""


class CancelScopes:
    """The scopes of one session.

    A scope exists while it has members or watchers, and, once it is cancelled, until it is deleted.
    """

    def __init__(self, take: Take, on_cancel: Callable[[str, str], None]) -> None:
        """`on_cancel` is called with scope and reason."""
        self._take, self._on_cancel = take, on_cancel
        self._scopes: dict[str, _Scope] = {}
        self._ended: dict[str, int] = {}  # family of scopes -> the highest number that has ended
        self._marks: OrderedDict[str, str] = OrderedDict()  # of deleted scopes; empty for those that were cancelled

    def __len__(self) -> int:
        return len(self._scopes)

    def check(self, name: str) -> None:
        """Raises Aborted with the reason if the scope, or one that it is in, is cancelled."""
        for within in _with_ancestors(name):
            if (scope := self._scopes.get(within)) is not None and scope.reason is not None:
                raise Aborted(scope.reason)

    def check_exists(self, name: str) -> None:
        """Raises Aborted if the scope is cancelled, or if neither it nor one that it is in exists.

        A rank that was stopped for long may be in a scope that the others have deleted since.
        """
        self.check(name)
        if name and self._scopes.keys().isdisjoint(_with_ancestors(name)):
            raise Aborted(ended(name))
        if name not in self._scopes:  # it was never entered, or it is deleted
            self.check_open(name)

    def check_open(self, name: str) -> None:
        """Raises Aborted if the scope, or one that it is in, is cancelled or has ended."""
        self.check(name)
        for scope in _with_ancestors(name):
            family, number = _numbered(scope)
            if 0 <= number <= self._ended.get(family, -1):
                raise Aborted(ended(scope))

    def enter(self, client: Client, name: str, who: str, within: str) -> None:
        """Raises Aborted if the scope is cancelled, has ended or has a mark, or if `within` is given and has ended."""
        self.check_open(name)
        if within and within not in self._scopes:
            raise Aborted(ended(within))
        if self.mark_of(name):
            raise Aborted(ended(name))
        self._scope(name).members[client] = who[:MAX_NAME_CHARACTERS]

    def watch(self, client: Client, name: str) -> None:
        """Raises Aborted if the scope is cancelled or has ended."""
        self.check_open(name)
        self._scope(name).watchers.add(client)

    def who(self, client: Client) -> str:
        """Returns the names with which a client has entered scopes, without repetition."""
        entered = (scope.members[client] for scope in self._scopes.values() if client in scope.members)
        return ", ".join(dict.fromkeys(entered))

    def takes_part(self, client: Client, name: str) -> bool:
        """Returns whether a client is a member of a scope, or of one that it is in."""
        scopes = (self._scopes.get(scope) for scope in _with_ancestors(name))
        return any(scope is not None and client in scope.members for scope in scopes)

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
        reason = reason[:_MAX_REASON_CHARACTERS]
        for within in [other for other in self._scopes if is_within(other, name)]:
            scope = self._scopes[within]
            if scope.reason is None:
                scope.reason = reason
                for client in list(scope.watchers):
                    client.send(protocol.Event(within, reason))
        self._on_cancel(name, reason)

    def check_markable(self, name: str) -> None:
        """Raises Aborted if the scope cannot get a mark: it has no members, is cancelled or has ended."""
        self.check_open(name)
        if name not in self._scopes:
            raise Aborted(ended(name))

    def set_mark(self, name: str, mark: str) -> None:
        """Marks a scope that `check_markable` has just let pass."""
        self._scopes[name].mark = mark

    def mark_of(self, name: str) -> str:
        """Returns a scope's mark, also of one that is deleted; empty if it has none."""
        scope = self._scopes.get(name)
        return scope.mark if scope is not None and scope.mark else self._marks.get(name, "")

    def revoke(self, name: str, reason: str) -> tuple[str, str, int]:
        """Cancels a scope unless it has a mark; afterwards it can no longer get one.

        Returns its mark, why it is cancelled, and how many members it has; empty strings where they do not apply. A
        scope with a mark that all its members have left is not cancelled. Raises Aborted if nothing is known of it, nor
        of one that it is in.
        """
        if name not in self._marks and not any(scope in self._scopes for scope in _with_ancestors(name)):
            raise Aborted(ended(name))
        if not self.mark_of(name) and name not in self._marks:
            self.cancel(name, reason)
        try:
            self.check(name)
            reason = "" if self.mark_of(name) else ended(name)
        except Aborted as aborted:
            reason = str(aborted)
        scope = self._scopes.get(name)
        return self.mark_of(name), reason, len(scope.members) if scope is not None else 0

    def end(self, name: str) -> None:
        """Ends a scope whose name ends with a number, and all of lower numbers, for ever: nobody enters them again.

        Those in it that have no mark are cancelled. Waits in the scope itself go on.
        """
        family, number = _numbered(name)
        if number < 0:
            raise QuotaExceeded(f"{name} does not end with a number")
        if family not in self._ended:
            self._take(0, 1)
        self._ended[family] = max(number, self._ended.get(family, -1))
        for within in [other for other in self._scopes if is_within(other, name) and other != name]:
            if not self._scopes[within].mark:
                self.cancel(within, ended(name))

    def disconnected(self, client: Client) -> None:
        """Cancels every scope that `client` is a member of."""
        entered = {name: scope.members[client] for name, scope in self._scopes.items() if client in scope.members}
        self.leave_all(client)
        for name, who in entered.items():
            self.cancel(name, f"{who} disconnected unexpectedly; was its process killed? Check its log")

    def delete(self, name: str) -> None:
        """Deletes a scope and all that are in it. Waits in it are cancelled."""
        for within in [other for other in self._scopes if is_within(other, name)]:
            self._delete(within)
        self._on_cancel(name, ended(name))

    def delete_all(self) -> None:
        for name in list(self._scopes):
            self._delete(name)
        self._take(0, -len(self._ended))
        self._ended, self._marks = {}, OrderedDict()

    def _delete(self, name: str) -> None:
        if (scope := self._scopes.pop(name, None)) is None:
            return
        self._take(-len(name), -1)
        if scope.mark or scope.reason is not None:
            self._marks[name] = scope.mark
            if len(self._marks) > _REMEMBERED:
                self._marks.popitem(last=False)

    def _scope(self, name: str) -> _Scope:
        if name not in self._scopes:
            self._take(len(name), 1)
            self._scopes[name] = _Scope()
        return self._scopes[name]


def ended(name: str) -> str:
    """Returns the reason for those who still wait in a scope that is gone."""
    return f"{name} has ended without this rank; was its process stopped?"


@lru_cache(_NAMES_IN_USE)
def _with_ancestors(name: str) -> tuple[str, ...]:
    """Returns "update/7/0", "update/7", "update"."""
    found = []
    while name:
        found.append(name)
        name = name.rpartition("/")[0]
    return tuple(found)


@lru_cache(_NAMES_IN_USE)
def _numbered(name: str) -> tuple[str, int]:
    """Returns ("update", 7) for "update/7", and -1 for a name that does not end with a number."""
    family, _, number = name.rpartition("/")
    return family, int(number) if number.isdecimal() else -1


def is_within(name: str, scope: str) -> bool:
    """Returns whether a scope is `scope`, or in it."""
    return name == scope or name.startswith(f"{scope}/")
