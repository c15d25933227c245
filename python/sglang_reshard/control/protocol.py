"""Messages between a control client and a control server, as msgpack arrays.

A request is `[number, operation, [argument, ...]]`; `number` ties its reply to it. If it is negative nobody waits, and
only a failure is replied to. An operation is a method of
`SessionStore` or of the server that is marked with `@operation`: its annotated parameters are the types of the
arguments on the wire, and its return value is the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_type_hints

import msgspec

from sglang_reshard.control.framing import ProtocolError
from sglang_reshard.control.limits import QuotaExceeded
from sglang_reshard.errors import Aborted

Method = TypeVar("Method", bound=Callable[..., object])

DEFERRED = object()
"""Returned by an operation that replies later, or has replied already."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Result(_Message, frozen=True):
    """A request succeeded."""

    number: int
    value: int | bytes | list[bytes | bool] | None


class TimedOut(_Message, frozen=True):
    """A wait ended without the keys, or the members, at these indices."""

    number: int
    missing: tuple[int, ...]


class Cancelled(_Message, frozen=True):
    """The request's scope is cancelled."""

    number: int
    reason: str


class Refused(_Message, frozen=True):
    """A request was not executed."""

    number: int
    message: str


class Event(_Message, frozen=True):
    """Sent without a request: a scope that the client watches is cancelled. None stands for the whole session."""

    scope: str | None
    reason: str


Reply = Result | TimedOut | Cancelled | Refused


class Client(Protocol):
    """The sender of a request; one object for each connection."""

    def send(self, message: Reply | Event) -> None: ...


@dataclass(eq=False, slots=True)
class Call:
    """A request that has no reply yet. `scope`: whose cancellation ends its wait."""

    client: Client
    number: int
    scope: str = ""


OPERATIONS: dict[str, msgspec.msgpack.Decoder[Any]] = {}  # name -> decoder of the arguments, a tuple
_requests = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_messages = msgspec.msgpack.Decoder(Reply | Event)
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def operation(method: Method) -> Method:
    """Lets clients call `method(self, call, *arguments)` by its name."""
    kinds = get_type_hints(method)
    names = list(inspect.signature(method).parameters)[2:]
    arguments: Any = tuple.__class_getitem__(tuple(kinds[name] for name in names))
    OPERATIONS[method.__name__] = msgspec.msgpack.Decoder(arguments)
    return method


def read_request(body: bytes | memoryview) -> tuple[int, str, tuple[Any, ...]]:
    """Returns number, operation and arguments. Raises ProtocolError."""
    try:
        number, name, arguments = _requests.decode(body)
        if name not in OPERATIONS:
            raise ProtocolError(f"unknown operation {name[:80]!r}")
        return number, name, OPERATIONS[name].decode(arguments)
    except _UNDECODABLE as error:
        raise _undecodable(error) from error


def read_message(body: bytes | memoryview) -> Reply | Event:
    """Returns what a control server sent. Raises ProtocolError."""
    try:
        return _messages.decode(body)
    except _UNDECODABLE as error:
        raise _undecodable(error) from error


def execute(owner: object, call: Call, name: str, arguments: tuple[Any, ...]) -> None:
    """Executes an operation of `owner` and replies to it, unless that is deferred."""
    reply: Reply
    try:
        value = getattr(owner, name)(call, *arguments)
        if value is DEFERRED:
            return
        reply = Result(call.number, value)
    except QuotaExceeded as error:
        reply = Refused(call.number, str(error))
    except Aborted as error:
        reply = Cancelled(call.number, str(error))
    if call.number >= 0 or not isinstance(reply, Result):
        call.client.send(reply)


def _undecodable(error: Exception) -> ProtocolError:
    return ProtocolError(f"a message cannot be decoded: {error}")
