"""The client's side of the handshake: opens a connection to a control server whose two ends have proved the key.

`framing` describes what is sent. The server's side is in `server`.
"""

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
    directions,
    proof,
    read_message,
)
from sglang_reshard.control.protocol import ProtocolError
from sglang_reshard.control.sockets import configure
from sglang_reshard.errors import DeadlineExceeded, ReshardError, Unauthorized

_RETRY_S = 0.1
_READ_BYTES = 256 * 1024


def server_name(address: Address) -> str:
    """Returns what errors call the server."""
    return f"the control server of trainer rank 0 at {address.host}:{address.port}"


def connect(address: Address, timeout_s: float) -> tuple[socket.socket, FrameWriter, FrameReader]:
    """Returns a connection with mutual proof of the key. Raises DeadlineExceeded or Unauthorized."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return _try_connect(address, end)
        except ConnectionRefusedError as error:  # a server listens before its address is known
            raise DeadlineExceeded(
                f"{server_name(address)} does not answer: {error}. Has its process ended? Check the log of trainer "
                "rank 0"
            ) from error
        except UnicodeError as error:
            raise DeadlineExceeded(
                f"{server_name(address)} cannot be reached: the host name cannot be resolved here; pass interface=, an "
                "address of trainer rank 0 that this host can reach"
            ) from error
        except OSError as error:
            # A server that many clients connect to at once may disconnect those whose handshake is slow.
            if time.monotonic() + _RETRY_S >= end:
                raise DeadlineExceeded(
                    f"{server_name(address)} did not answer within {timeout_s:g} s: {error}. Is its process stopped, "
                    "or can this host not reach the address?"
                ) from error
        time.sleep(_RETRY_S)


def _try_connect(address: Address, end: float) -> tuple[socket.socket, FrameWriter, FrameReader]:
    connection = configure(socket.create_connection((address.host, address.port), _left_s(end)))
    try:
        key, client_nonce = address.secret(), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(MAGIC + client_nonce)
        answer = b""
        while len(answer) < ANSWER_BYTES:
            answer += _read(connection, ANSWER_BYTES - len(answer), end)
        nonces = client_nonce, answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], proof(key, b"server", *nonces)):
            raise Unauthorized(
                f"the process that listens at {address.host}:{address.port} does not have the key of trainer rank 0's "
                "session: the address belongs to another session, or another program has taken the port. Make a new "
                "WeightSender on every trainer rank"
            )
        writer, reader = directions(key, b"client", b"server", *nonces)
        connection.sendall(proof(key, b"client", *nonces) + writer.frame((0, "hello", (address.session,))))
        while not (bodies := reader.feed(_read(connection, _READ_BYTES, end))):
            pass
        reply = read_message(bodies[0])  # the only one: a server sends nothing before the next request
        if isinstance(reply, protocol.Refused):
            raise ReshardError(f"{server_name(address)} refused the connection: {reply.message}")
        return connection, writer, reader
    except ProtocolError as error:
        connection.close()
        raise Unauthorized(
            f"data from {address.host}:{address.port} did not come from the control server of trainer rank 0: {error}. "
            "Does another program alter the connection?"
        ) from error
    except BaseException:
        connection.close()
        raise


def _read(connection: socket.socket, size: int, end: float) -> bytes:
    connection.settimeout(_left_s(end))
    if not (data := connection.recv(size)):
        raise OSError("it disconnected")
    return data


def _left_s(end: float) -> float:
    return max(end - time.monotonic(), 0.001)
