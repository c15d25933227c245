"""Messages between a control client and a control server, as msgpack arrays.

A request is `[number, operation, [argument, ...]]`; `number` ties its reply to it. If it is negative nobody waits, and
only a failure is replied to. An operation is a method of
`SessionStore` or of the server that is marked with `@operation`: its annotated parameters are the types of the
arguments on the wire, and its return value is the result.
"""

from __future__ import annotations

import inspect
from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_type_hints

import msgspec

Method = TypeVar("Method", bound=Callable[..., object])

ENDED = "ended the session"  # why a connection ends that is not lost
DEFERRED = object()
"""Returned by an operation that replies later, or has replied already."""


class ProtocolError(Exception):
    """Received bytes are not what an authenticated peer sends; the connection must be closed."""


class QuotaExceeded(Exception):
    """A request exceeds a limit, or contradicts another one. The message is for the client that sent it."""


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
    """A request that has no reply yet.

    scope  whose cancellation ends its wait
    timer  of its wait
    """

    client: Client
    number: int
    scope: str = ""
    timer: TimerHandle | None = None


OPERATIONS: dict[str, msgspec.msgpack.Decoder[Any]] = {}  # name -> decoder of the arguments, a tuple


def operation(method: Method) -> Method:
    """Lets clients call `method(self, call, *arguments)` by its name."""
    kinds = get_type_hints(method)
    names = list(inspect.signature(method).parameters)[2:]
    arguments: Any = tuple.__class_getitem__(tuple(kinds[name] for name in names))
    OPERATIONS[method.__name__] = msgspec.msgpack.Decoder(arguments)
    return method
