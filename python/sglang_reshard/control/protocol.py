"""What a line and a hub say to each other. `number` ties a reply to its request."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sglang_reshard.control.framing import ProtocolError

T = TypeVar("T")


class _Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class _Request(_Word, frozen=True):
    number: int


class Hello(_Request, frozen=True):
    """The first of a connection."""

    session: str


class Set(_Request, frozen=True):
    items: dict[str, bytes]


class Get(_Request, frozen=True):
    """Answered once all keys are there; `values` says whether what they hold is wanted."""

    keys: tuple[str, ...]
    timeout_s: float
    scope: str
    values: bool


class Exists(_Request, frozen=True):
    keys: tuple[str, ...]


class Add(_Request, frozen=True):
    key: str
    n: int


class CompareAndSet(_Request, frozen=True):
    """Set `key` to `desired` if it holds `expected`, or if it is missing and nothing is expected."""

    key: str
    expected: bytes
    desired: bytes


class Delete(_Request, frozen=True):
    keys: tuple[str, ...]


class Append(_Request, frozen=True):
    name: str
    data: bytes


class CountKeys(_Request, frozen=True):
    pass


class Gather(_Request, frozen=True):
    name: str
    index: int
    size: int
    data: bytes
    timeout_s: float
    scope: str


class Enter(_Request, frozen=True):
    scope: str
    who: str


class Leave(_Request, frozen=True):
    scope: str


class Abort(_Request, frozen=True):
    scope: str
    reason: str


class Watch(_Request, frozen=True):
    scope: str


class Forget(_Request, frozen=True):
    scope: str


class EndSession(_Request, frozen=True):
    pass


class Disconnect(_Request, frozen=True):
    """Leave all scopes; the connection will end."""


Request = (
    Hello
    | Set
    | Get
    | Exists
    | Add
    | CompareAndSet
    | Delete
    | Append
    | CountKeys
    | Gather
    | Enter
    | Leave
    | Abort
    | Watch
    | Forget
    | EndSession
    | Disconnect
)


class Ok(_Request, frozen=True):
    pass


class Values(_Request, frozen=True):
    values: tuple[bytes, ...]


class Number(_Request, frozen=True):
    value: int


class Flags(_Request, frozen=True):
    flags: tuple[bool, ...]


class TimedOut(_Request, frozen=True):
    """The indices of what did not come in time."""

    missing: tuple[int, ...]


class Cancelled(_Request, frozen=True):
    """The scope of the request is aborted."""

    reason: str


class Refused(_Request, frozen=True):
    """Nothing was done."""

    message: str


class ScopeAborted(_Word, frozen=True):
    """To all who watch the scope."""

    scope: str
    reason: str


class SessionEnded(_Word, frozen=True):
    """The last of a connection."""


Reply = Ok | Values | Number | Flags | TimedOut | Cancelled | Refused
Event = ScopeAborted | SessionEnded

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply | Event)


def read_request(body: bytes | memoryview) -> Request:
    """Raises Unacceptable."""
    return _read(_requests, body)


def read_reply(body: bytes | memoryview) -> Reply | Event:
    """Raises Unacceptable."""
    return _read(_replies, body)


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes | memoryview) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a word that cannot be read: {error}") from error
