"""A connection between a control client and a control server: its address, its sockets and the bytes on it.

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

Sockets are kept alive, without delay, and closed in processes that are forked. A host that vanishes without a word (its
link is down, it has lost power) is noticed within 10 s: by keepalive while nothing is under way, and by `silence` while
sent bytes are not acknowledged: then no keepalive is sent, and TCP itself would go on for a quarter of an hour. A
process that is only stopped is not: its host acknowledges. (TCP_USER_TIMEOUT would end its connection once its buffer
is full.)
"""

from __future__ import annotations

import asyncio.trsock
import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from sglang_reshard.control.protocol import OPERATIONS, Event, ProtocolError, QuotaExceeded, Refused, Reply
from sglang_reshard.errors import DeadlineExceeded, ReshardError, Unauthorized, Unsupported

T = TypeVar("T")

MAGIC = b"reshard4"
NONCE_BYTES = PROOF_BYTES = MAC_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
MAX_FRAME_BYTES = 256 * 2**20

_LENGTH, _HEAD, _NUMBER = struct.Struct(">I"), struct.Struct(">IQ"), struct.Struct(">Q")
_MIN_LENGTH = _NUMBER.size + MAC_BYTES
READ_BYTES = 256 * 1024
_RETRY_S = 0.1

LOOK_S = 1.0  # how often to look at `silence`
_SILENT_S = 7.0
_KEEPALIVE_S = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 7}  # several probes, as any may be lost
# struct tcp_info of Linux: 8 bytes of flags, then unsigned integers, among them segments that are not acknowledged, and
# milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("=8x13I")
_UNACKNOWLEDGED, _SINCE_ACKNOWLEDGED = 4, 12

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_messages = msgspec.msgpack.Decoder(Reply | Event)
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Address(msgspec.Struct, frozen=True):
    """Host and port of a control server, and one of its sessions. Any process that has it can join, so keep it private.

    session  name of the session
    host     IP address or name that the control server listens on
    port     its TCP port
    key      32 random bytes, as hex; omitted from every representation
    """

    session: Annotated[str, msgspec.Meta(max_length=512)]  # names of keys and scopes are added to it
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[^\0]+\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def named(self, name: str) -> Address:
        """Returns the address of another session of the same server, with separate keys, all-gathers and scopes."""
        return msgspec.structs.replace(self, session=f"{self.session}/{name}")

    def secret(self) -> bytes:
        """Returns the key's bytes. Raises Unauthorized if the key is not hexadecimal."""
        try:
            return bytes.fromhex(self.key)
        except ValueError:
            raise Unauthorized(f"{self}: the key is not hexadecimal; pass the session address unchanged") from None

    def __repr__(self) -> str:
        return f"Address(session={self.session!r}, host={self.host!r}, port={self.port!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("session", self.session), ("host", self.host), ("port", self.port)]


# -- sockets


def listen(interface: str) -> socket.socket:
    """Listens on a free port of `interface`, an address of this host.

    Raises OSError for the address of another host, and Unsupported for one that means all of this host's interfaces.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    _open.add(listener)
    try:
        listener.bind((interface, 0))
        if ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_unspecified:
            raise Unsupported(
                f"interface={interface!r} means all interfaces of this host, and peers cannot connect to that. Pass "
                "one address of this host that they can reach"
            )
        listener.listen(4096)
    except (OSError, Unsupported):
        listener.close()
        raise
    return listener


def configure(connection: socket.socket) -> socket.socket:
    """Sets keepalive and no-delay, and lets forked children close the socket.

    A child that kept it would hold the connection open after this process was killed.
    """
    _open.add(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_S.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def silence(connection: socket.socket | asyncio.trsock.TransportSocket) -> str:
    """Returns why a connection has to end if the other end has acknowledged nothing for long, while something is under
    way to it; else nothing.

    Not longer than keepalive's first probe is waited for, if its host is there: an idle connection is probed, and the
    probes are acknowledged. Raises OSError for a connection that is closed.
    """
    if not hasattr(socket, "TCP_INFO"):  # not on every system
        return ""
    info = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    silent_s = info[_SINCE_ACKNOWLEDGED] / 1000 if info[_UNACKNOWLEDGED] else 0.0
    return f"its host has not acknowledged anything for {silent_s:.0f} s" if silent_s > _SILENT_S else ""


def _close_all() -> None:
    for connection in list(_open):
        with contextlib.suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_all)


# -- the handshake, on the client's side; the server's is in `server`


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
        while not (bodies := reader.feed(_read(connection, READ_BYTES, end))):
            pass
        reply = read_message(bodies[0])  # the only one: a server sends nothing before the next request
        if isinstance(reply, Refused):
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


# -- frames


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


def proof(key: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes, what: bytes = b"proof") -> bytes:
    """Returns the proof that `side` (b"client" or b"server") has the key."""
    return hmac.digest(key, b"sglang-reshard " + what + b" of " + side + client_nonce + server_nonce, "sha256")


def directions(
    key: bytes, own: bytes, other: bytes, client_nonce: bytes, server_nonce: bytes
) -> tuple[FrameWriter, FrameReader]:
    """Returns the writer of side `own` (b"client" or b"server") and the reader of frames that `other` sends to it."""
    own_key, others_key = (proof(key, side, client_nonce, server_nonce, b"frames") for side in (own, other))
    return FrameWriter(own_key), FrameReader(others_key)


def read_request(body: bytes | memoryview) -> tuple[int, str, tuple[Any, ...]]:
    """Returns number, operation and arguments. Raises ProtocolError."""
    number, name, arguments = _decoded(_requests.decode, body)
    if name not in OPERATIONS:
        raise ProtocolError(f"unknown operation {name[:80]!r}")
    return number, name, _decoded(OPERATIONS[name].decode, arguments)


def read_message(body: bytes | memoryview) -> Reply | Event:
    """Returns what a control server sent. Raises ProtocolError."""
    return _decoded(_messages.decode, body)


def _decoded(decode: Callable[[Any], T], data: bytes | memoryview | msgspec.Raw) -> T:
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be decoded: {error}") from error
