"""The line's side of the handshake."""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from sglang_reshard.control import protocol
from sglang_reshard.control.address import Address
from sglang_reshard.control.framing import (
    ANSWER_BYTES,
    MAGIC,
    NONCE_BYTES,
    FrameReader,
    FrameWriter,
    ProtocolError,
    direction_key,
    proof,
)
from sglang_reshard.control.sockets import own, prepare
from sglang_reshard.errors import DeadlineExceeded, ReshardError, Unauthorized

_AGAIN_S = 0.1


def connect(address: Address, timeout_s: float) -> tuple[socket.socket, FrameWriter, FrameReader]:
    """A connection whose two sides know each other's key. Raises DeadlineExceeded or Unauthorized."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return _try(address, end)
        except ConnectionRefusedError as error:  # a hub listens before anybody knows its address
            raise DeadlineExceeded(
                f"{_where(address)} does not answer: {error}; has the process of trainer rank 0 ended? Look at its log"
            ) from error
        except OSError as error:
            # A hub that many lines come to at once may turn away those that are slow to prove themselves.
            if time.monotonic() + _AGAIN_S >= end:
                raise DeadlineExceeded(
                    f"{_where(address)} did not answer within {timeout_s:g} s: {error}; is its process stopped, or is "
                    "the address one that this host cannot reach?"
                ) from error
        time.sleep(_AGAIN_S)


def _try(address: Address, end: float) -> tuple[socket.socket, FrameWriter, FrameReader]:
    connection = own(socket.create_connection((address.host, address.port), _left(end)))
    try:
        prepare(connection)
        key, line_nonce = address.secret(), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + line_nonce)
        answer = b""
        while len(answer) < ANSWER_BYTES:
            answer += _piece(connection, ANSWER_BYTES - len(answer), end)
        hub_nonce, shown = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(shown, proof(key, b"hub", line_nonce, hub_nonce)):
            raise Unauthorized(
                f"who listens at {address.host}:{address.port} does not know the key of trainer rank 0's session: the "
                "address is of another session, or a stranger has taken the port"
            )
        sealer = FrameWriter(direction_key(key, b"line", line_nonce, hub_nonce))
        opener = FrameReader(direction_key(key, b"hub", line_nonce, hub_nonce))
        hello = sealer.seal(protocol.Hello(0, address.session))
        connection.sendall(proof(key, b"line", line_nonce, hub_nonce) + hello)
        reply = protocol.read_reply(_frame(connection, opener, end))
        if isinstance(reply, protocol.Refused):
            raise ReshardError(f"{_where(address)} refused the connection: {reply.message}")
        return connection, sealer, opener
    except ProtocolError as error:
        connection.close()
        raise Unauthorized(
            f"what came from {address.host}:{address.port} is not from trainer rank 0's session: {error}; does "
            "somebody meddle with the connection?"
        ) from error
    except BaseException:
        connection.close()
        raise


def _frame(connection: socket.socket, opener: FrameReader, end: float) -> memoryview:
    while not (bodies := opener.open(_piece(connection, opener.missing(), end))):
        pass
    return bodies[0]  # a hub says nothing more before it is asked


def _piece(connection: socket.socket, size: int, end: float) -> bytes:
    connection.settimeout(_left(end))
    if not (piece := connection.recv(size)):
        raise OSError("it hung up")
    return piece


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def _where(address: Address) -> str:
    return f"trainer rank 0's session at {address.host}:{address.port}"
