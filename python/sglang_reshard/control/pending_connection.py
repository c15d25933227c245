"""A connection to a hub that has not yet proved that it knows the session's key."""

from __future__ import annotations

import hmac
import secrets
import socket

from sglang_reshard.control.framing import (
    MAGIC,
    NONCE_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    FrameReader,
    FrameWriter,
    ProtocolError,
    direction_key,
    proof,
)


class PendingConnection:
    """The hub's side of the handshake. Never reads beyond it, so what a stranger sends costs nothing."""

    def __init__(self, connection: socket.socket, peer: str, key: bytes, since: float) -> None:
        self.connection, self.peer, self.since = connection, peer, since
        self._key = key
        self._said = b""
        self._line_nonce = b""
        self._hub_nonce = b""

    def read(self) -> tuple[FrameWriter, FrameReader] | None:
        """Take in what has come. The two directions once it has proved itself; Raises Unacceptable or OSError."""
        wanted = PROOF_BYTES if self._line_nonce else OPENING_BYTES
        piece = self.connection.recv(wanted - len(self._said))
        if not piece:
            raise ProtocolError("it hung up before it proved that it knows the session's key")
        self._said += piece
        if not self._line_nonce:
            self._open()
            return None
        return self._judge() if len(self._said) == PROOF_BYTES else None

    def _open(self) -> None:
        if not MAGIC.startswith(self._said[: len(MAGIC)]):
            raise ProtocolError("it does not speak this package's language, or another version of it")
        if len(self._said) < OPENING_BYTES:
            return
        self._line_nonce, self._said = self._said[len(MAGIC) :], b""
        self._hub_nonce = secrets.token_bytes(NONCE_BYTES)
        answer = self._hub_nonce + proof(self._key, b"hub", self._line_nonce, self._hub_nonce)
        if self.connection.send(answer) < len(answer):  # the first bytes of a connection: its buffer is empty
            raise ProtocolError("it takes no answer")

    def _judge(self) -> tuple[FrameWriter, FrameReader]:
        nonces = (self._line_nonce, self._hub_nonce)
        if not hmac.compare_digest(self._said, proof(self._key, b"line", *nonces)):
            raise ProtocolError("it does not know the session's key")
        return FrameWriter(direction_key(self._key, b"hub", *nonces)), FrameReader(
            direction_key(self._key, b"line", *nonces)
        )
