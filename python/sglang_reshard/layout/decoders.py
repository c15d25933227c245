"""Makes msgspec's decoders, one at a time, and packs manifests: msgpack, compressed, named by their content hash.

msgspec (0.22) caches data about a struct's fields in the struct's class, and fills the cache in while other threads may
already use it: two threads that decode a class for the first time can crash the process. So all decoders of classes
that several threads may decode are made here.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec

from sglang_reshard.errors import Mismatch

# A layout of 100,000 tensors takes 7 MB. What is decoded may take 25 times the bytes that it is decoded from.
MAX_BYTES = 1 << 27
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


def pack_blob(message: object) -> tuple[str, bytes]:
    """A message's content hash, and the message compressed."""
    raw = msgspec.msgpack.encode(message)
    return hashlib.sha256(raw).hexdigest(), zlib.compress(raw, 1)


def unpack_blob(
    data: bytes, kind: type[T], expect: str = "", *, what: str = "the manifest", max_bytes: int = MAX_BYTES
) -> T:
    """A message that was packed by `pack_blob`.

    expect     its content hash; empty where only its place is known
    what       its name in error messages, "the source layout"
    max_bytes  that it may take, unpacked

    Raises Mismatch if it is truncated, too large, or of another content or kind.
    """
    raw = inflate(data, max_bytes, what)
    if expect and hashlib.sha256(raw).hexdigest() != expect:
        raise Mismatch(
            f"{what} does not match its content hash {expect[:12]!r}: something else was stored in its place. Start a "
            "new session"
        )
    try:
        return msgpack_decoder(kind).decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Mismatch(
            f"{what} cannot be read: {error}. Trainer and engine must run the same version of sglang-reshard"
        ) from error


def inflate(data: bytes, max_bytes: int, what: str = "the manifest") -> bytes:
    """Decompress at most `max_bytes`. Raises Mismatch for more, and for a truncated or invalid zlib stream."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise Mismatch(f"{what} is damaged: {error}. Start a new session") from error
    if len(raw) > max_bytes:
        raise Mismatch(
            f"{what} decompresses to more than {max_bytes:,} bytes, the limit. Was it published by sglang_reshard?"
        )
    if not stream.eof or stream.unused_data:
        raise Mismatch(f"{what} is damaged: it is truncated, or has data after its end. Start a new session")
    return raw
