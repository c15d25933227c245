"""Makes msgspec's decoders, one at a time.

msgspec (0.22) caches data about a struct's fields in the struct's class, and fills the cache in while other threads may
already use it: two threads that decode a class for the first time can crash the process. So all decoders of classes
that several threads may decode are made here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.Lock()


def _cached(make: F) -> F:
    """`functools.cache`, whose type does not know that a `type[T]` can be hashed."""
    return cache(make)  # type: ignore[return-value]


@_cached
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    with _lock:
        return msgspec.msgpack.Decoder(kind)


@_cached
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    with _lock:
        return msgspec.json.Decoder(kind)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Returns a message of type `kind`. Raises msgspec.DecodeError for any other bytes."""
    try:
        return json_decoder(kind).decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def convert(value: Any, kind: type[T]) -> T:
    """Returns `msgspec.convert(value, kind)`."""
    msgpack_decoder(kind)
    return msgspec.convert(value, kind)
