"""A control server's session as a value: it can be kept, compared and continued from."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from sglang_reshard.control import protocol
from sglang_reshard.control.connection import read_request
from sglang_reshard.control.scopes import _Scope
from sglang_reshard.control.server import MemoryQuota
from sglang_reshard.control.store import SessionStore, _AllGather, execute


class Frozen(NamedTuple):
    """What a session holds: scopes, those that have ended, marks of deleted ones, all-gathers."""

    scopes: tuple[Any, ...] = ()
    ended: tuple[tuple[str, int], ...] = ()
    marks: tuple[tuple[str, str], ...] = ()
    gathers: tuple[Any, ...] = ()


class _Timer:
    def cancel(self) -> None:
        pass


class _Client(str):
    sent: list[tuple[str, Any]]

    def send(self, message: Any) -> None:
        self.sent.append((str(self), message))


class Server:
    """A session that continues from a frozen one. `sent`: to whom it has sent what."""

    def __init__(self, frozen: Frozen) -> None:
        self.sent: list[tuple[str, Any]] = []
        quota = MemoryQuota(lambda: None)
        self._store = store = SessionStore(quota.take, lambda _delay, _function: _Timer())  # type: ignore[arg-type,return-value]
        scopes = store._scopes
        for name, members, watchers, reason, mark in frozen.scopes:
            entered = {self._client(client): who for client, who in members}
            scopes._scopes[name] = _Scope(entered, {self._client(c) for c in watchers}, reason, mark)
        scopes._ended.update(frozen.ended)
        scopes._marks.update(frozen.marks)
        for name, scope, size, mark, arrived, missing, informed in frozen.gathers:
            gather = store._gathers[name] = _AllGather(name, scope, size, mark)
            for index, client, number, data in arrived:
                gather.arrived[index] = (protocol.Call(self._client(client), number, scope), data)
            gather.missing, gather.informed = missing or None, set(informed)

    def freeze(self) -> Frozen:
        scopes, gathers = self._store._scopes, self._store._gathers
        return Frozen(
            tuple(sorted((name, *_scope(scope)) for name, scope in scopes._scopes.items())),
            tuple(sorted(scopes._ended.items())),
            tuple(sorted(scopes._marks.items())),
            tuple(sorted(_gather(gather) for gather in gathers.values())),
        )

    def do(self, client: str, number: int, operation: str, *arguments: Any) -> None:
        """Executes a request as the server does; a negative number is one that nobody waits for."""
        message = read_request(msgspec.msgpack.encode((number, operation, arguments)))
        execute(self._store, protocol.Call(self._client(client), message[0]), message[1], message[2])

    def disconnected(self, client: str) -> None:
        self._store.disconnected(self._client(client))

    def time_out(self, gather: str) -> None:
        self._store._time_out_gather(self._store._gathers[gather])

    def waiting(self) -> list[str]:
        """Returns the all-gathers that may time out."""
        return [g.name for g in self._store._gathers.values() if g.arrived and g.missing is None]

    def _client(self, name: str) -> _Client:
        client = _Client(name)
        client.sent = self.sent
        return client


def _scope(scope: _Scope) -> tuple[Any, ...]:
    members = tuple(sorted((str(client), who) for client, who in scope.members.items()))
    return members, tuple(sorted(map(str, scope.watchers))), scope.reason, scope.mark


def _gather(gather: _AllGather) -> tuple[Any, ...]:
    arrived = tuple(sorted((i, str(call.client), call.number, data) for i, (call, data) in gather.arrived.items()))
    informed = tuple(sorted(gather.informed))
    return gather.name, gather.scope, gather.size, gather.mark, arrived, gather.missing or (), informed
