"""Frames, authentication and decoding: the bytes of a connection between a control client and a control server.

    client to server   MAGIC, client nonce
    server to client   server nonce, proof
    client to server   proof, frames

A proof is an HMAC-SHA256 over both nonces with the session's key. Each direction of each connection has a separate key,
derived in the same way, so that a frame of another connection or of the other direction is refused. A frame is

    4 bytes       number of bytes that follow
    8 bytes       sequence number in its direction, from 0
    any           body, as msgpack
    32 bytes      HMAC over sequence number and body

Only a frame's length is read before its HMAC is verified. Frames are authenticated, not encrypted.
"""

from __future__ import annotations

import hmac
import struct
from typing import Any

import msgspec

from sglang_reshard.control.protocol import OPERATIONS, Event, ProtocolError, QuotaExceeded, Reply

MAGIC = b"reshard4"
NONCE_BYTES = PROOF_BYTES = MAC_BYTES = 32
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
MAX_FRAME_BYTES = 256 * 2**20

_LENGTH, _HEAD, _NUMBER = struct.Struct(">I"), struct.Struct(">IQ"), struct.Struct(">Q")
_MIN_LENGTH = _NUMBER.size + MAC_BYTES
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_messages = msgspec.msgpack.Decoder(Reply | Event)
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def proof(key: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Returns the proof that `side` (b"client" or b"server") has the key."""
    return hmac.digest(key, b"sglang-reshard proof of " + side + client_nonce + server_nonce, "sha256")


class FrameWriter:
    """Turns the messages of one direction into frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._next = 0

    def frame(self, message: object) -> bytearray:
        """Returns the next frame. Raises QuotaExceeded, without advancing, for a message beyond MAX_FRAME_BYTES."""
        frame = bytearray(_HEAD.size)
        _encoder.encode_into(message, frame, _HEAD.size)
        body_bytes = len(frame) - _HEAD.size
        if body_bytes > MAX_FRAME_BYTES:
            raise QuotaExceeded(f"a message of {body_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
        _HEAD.pack_into(frame, 0, body_bytes + _MIN_LENGTH, self._next)
        with memoryview(frame) as view, view[_LENGTH.size :] as authenticated:
            mac = hmac.digest(self._key, authenticated, "sha256")
        frame += mac
        self._next += 1
        return frame


class FrameReader:
    """Turns the bytes of one direction, split anywhere, into the bodies of frames.

    unfinished_bytes  of the current frame, which is not complete; 0 if none has begun
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._next = 0
        self._buffer = bytearray()
        self.unfinished_bytes = 0

    def feed(self, data: bytes | memoryview) -> list[memoryview]:
        """Returns the bodies that `data` completes. Raises ProtocolError, and cannot be used after that."""
        buffer = self._buffer
        buffer += data
        bodies = []
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if not _MIN_LENGTH <= length <= _MIN_LENGTH + MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is out of range")
            length += _LENGTH.size
            if len(buffer) < length:
                break
            if len(buffer) == length:  # a large frame is not copied
                frame, buffer = buffer, bytearray()
            else:
                frame = buffer[:length]
                del buffer[:length]
            bodies.append(self._body(frame))
        self._buffer = buffer
        self.unfinished_bytes = len(buffer)
        return bodies

    def _body(self, frame: bytearray) -> memoryview:
        view = memoryview(frame)
        mac = hmac.digest(self._key, view[_LENGTH.size : -MAC_BYTES], "sha256")
        if not hmac.compare_digest(mac, view[-MAC_BYTES:]):
            raise ProtocolError("a frame is not authentic; another program may have altered the connection")
        _, number = _HEAD.unpack_from(frame)
        if number != self._next:
            raise ProtocolError(f"frame {number} arrived instead of frame {self._next}: a frame was repeated or lost")
        self._next += 1
        return view[_HEAD.size : -MAC_BYTES]


def directions(
    key: bytes, own: bytes, other: bytes, client_nonce: bytes, server_nonce: bytes
) -> tuple[FrameWriter, FrameReader]:
    """Returns the writer of side `own` (b"client" or b"server") and the reader of frames that `other` sends to it."""

    def direction_key(side: bytes) -> bytes:
        return hmac.digest(key, b"sglang-reshard frames of " + side + client_nonce + server_nonce, "sha256")

    return FrameWriter(direction_key(own)), FrameReader(direction_key(other))


def read_request(body: bytes | memoryview) -> tuple[int, str, tuple[Any, ...]]:
    """Returns number, operation and arguments. Raises ProtocolError."""
    try:
        number, name, arguments = _requests.decode(body)
        if name not in OPERATIONS:
            raise ProtocolError(f"unknown operation {name[:80]!r}")
        return number, name, OPERATIONS[name].decode(arguments)
    except _UNDECODABLE as error:
        raise ProtocolError(f"a message cannot be decoded: {error}") from error


def read_message(body: bytes | memoryview) -> Reply | Event:
    """Returns what a control server sent. Raises ProtocolError."""
    try:
        return _messages.decode(body)
    except _UNDECODABLE as error:
        raise ProtocolError(f"a message cannot be decoded: {error}") from error
