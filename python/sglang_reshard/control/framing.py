"""What the bytes of a connection are: a handshake, then authenticated frames.

    line to hub   MAGIC, line's nonce
    hub to line   hub's nonce, proof
    line to hub   proof, frames

A proof is an HMAC-SHA256 over both nonces with the session's key; each direction of each connection has a key of
its own, made the same way, so that a frame of another connection or of the other direction is refused. A frame is

    4 bytes       how many bytes follow
    8 bytes       number of the frame in its direction, from 0
    any           body, a msgspec struct
    32 bytes      HMAC over number and body

Nothing of a frame but its length is looked at before its HMAC is verified. It says who speaks, and hides nothing:
the channel is not encrypted.
"""

from __future__ import annotations

import hmac
import struct

import msgspec

MAGIC = b"reshard1"
NONCE_BYTES = PROOF_BYTES = MAC_BYTES = 32
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
MAX_FRAME_BYTES = 256 * 2**20

_LENGTH, _HEAD, _NUMBER = struct.Struct(">I"), struct.Struct(">IQ"), struct.Struct(">Q")
_LEAST = _NUMBER.size + MAC_BYTES
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """What came over a connection is not what an authenticated other side would send; the connection has to end."""


class FrameTooLarge(Exception):
    """A message that would be refused at the other side; nothing was sent."""


def proof(key: bytes, side: bytes, line_nonce: bytes, hub_nonce: bytes) -> bytes:
    """What `side` (b"line" or b"hub") shows of its knowing the key."""
    return hmac.digest(key, b"sglang-reshard proof of " + side + line_nonce + hub_nonce, "sha256")


def direction_key(key: bytes, side: bytes, line_nonce: bytes, hub_nonce: bytes) -> bytes:
    """Of the frames that `side` sends in one connection."""
    return hmac.digest(key, b"sglang-reshard frames of " + side + line_nonce + hub_nonce, "sha256")


class FrameWriter:
    """Turns the messages of one direction into frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._next = 0

    def seal(self, message: msgspec.Struct) -> bytearray:
        """Raises TooLarge."""
        frame = bytearray(_HEAD.size)
        _encoder.encode_into(message, frame, _HEAD.size)
        body = len(frame) - _HEAD.size
        if body > MAX_FRAME_BYTES:
            raise FrameTooLarge(f"a message of {body} bytes; at most {MAX_FRAME_BYTES} are carried")
        _HEAD.pack_into(frame, 0, body + _LEAST, self._next)
        with memoryview(frame) as view, view[_LENGTH.size :] as signed:
            mac = hmac.digest(self._key, signed, "sha256")
        frame += mac
        self._next += 1
        return frame


class FrameReader:
    """Turns the bytes of one direction, in whatever pieces they come, into the bodies of frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._next = 0
        self._bytes = bytearray()

    def open(self, piece: bytes) -> list[memoryview]:
        """The bodies that are complete with `piece`. Raises Unacceptable, and is of no use after that."""
        self._bytes += piece
        bodies = []
        while (length := self._length()) is not None and len(self._bytes) >= length:
            bodies.append(self._body(self._take(length)))
        return bodies

    def missing(self) -> int:
        """How many bytes are known to be missing of the frame under way."""
        length = self._length()
        return _LENGTH.size if length is None else length - len(self._bytes)

    @property
    def broken_off(self) -> bool:
        """Whether the connection, if it ends here, ends within a frame."""
        return bool(self._bytes)

    def _length(self) -> int | None:
        """Of the frame under way, with its own first bytes."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if not _LEAST <= length <= _LEAST + MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame said to have {length} bytes")
        return _LENGTH.size + length

    def _take(self, length: int) -> bytearray:
        if len(self._bytes) == length:  # a large frame is not copied
            frame, self._bytes = self._bytes, bytearray()
        else:
            frame = self._bytes[:length]
            del self._bytes[:length]
        return frame

    def _body(self, frame: bytearray) -> memoryview:
        view = memoryview(frame)
        mac = hmac.digest(self._key, view[_LENGTH.size : -MAC_BYTES], "sha256")
        if not hmac.compare_digest(mac, view[-MAC_BYTES:]):
            raise ProtocolError("a frame that is not authentic")
        _, number = _HEAD.unpack_from(frame)
        if number != self._next:
            raise ProtocolError(f"frame {number} in the place of frame {self._next}: repeated or lost")
        self._next += 1
        return view[_HEAD.size : -MAC_BYTES]
