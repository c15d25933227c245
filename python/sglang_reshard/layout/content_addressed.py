"""The form of a manifest in transit: msgpack, compressed, and named by its content hash."""

from __future__ import annotations

import hashlib
import zlib
from typing import TypeVar

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.decoders import msgpack_decoder

T = TypeVar("T")
# A layout of 100,000 tensors takes 7 MB. What is decoded may take 25 times the bytes that it is decoded from.
MAX_BYTES = 1 << 27


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
