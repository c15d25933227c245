"""Whatever bytes come over a connection: they are read as what was sent, or refused. Nothing else happens."""

import contextlib
import logging.handlers
import socket
from random import Random
from typing import Any

import msgspec
import pytest

from fuzz.arbitrary import damaged, value_of
from fuzz.settings import fuzzed
from sglang_reshard.control import ControlClient, ControlServer, protocol, server
from sglang_reshard.control.connection import (
    ANSWER_BYTES,
    MAGIC,
    FrameReader,
    FrameWriter,
    directions,
    proof,
    read_message,
    read_request,
)
from sglang_reshard.control.protocol import ProtocolError

KEY = bytes(range(32))
SOON_S = 60.0


def read_bodies(reader: FrameReader, stream: bytes, random: Random) -> list[bytes]:
    """The frames' bodies of a stream that comes in pieces, until it is refused or ends."""
    bodies, at = [], 0
    with contextlib.suppress(ProtocolError):
        while at < len(stream):
            size = random.choice((1, 3, 100, 10_000))
            bodies += map(bytes, reader.feed(stream[at : at + size]))
            at += size
    return bodies


def some_frames(random: Random) -> list[bytes]:
    writer = FrameWriter(KEY)
    return [bytes(writer.frame(some_request(random))) for _ in range(random.randint(1, 4))]


def some_request(random: Random) -> tuple[int, str, tuple[Any, ...]]:
    operation = random.choice(sorted(protocol.OPERATIONS))
    return value_of(int, random), operation, value_of(protocol.OPERATIONS[operation].type, random)


def mangled(frames: list[bytes], random: Random) -> bytes:
    frames = list(frames)
    at = random.randrange(len(frames))
    match random.randrange(5):
        case 0:
            frames[at] = bytes(damaged(frames[at], random))
        case 1:
            frames.insert(at, random.choice(frames))
        case 2:
            del frames[at]
        case 3:
            random.shuffle(frames)
        case 4:  # another length, another number
            where, size = random.choice(((0, 4), (4, 8)))
            frames[at] = frames[at][:where] + random.randbytes(size) + frames[at][where + size :]
    return b"".join(frames)


@fuzzed
def test_arbitrary_bytes_are_never_read(random):
    assert read_bodies(FrameReader(KEY), random.randbytes(random.choice((0, 3, 44, 500, 5000))), random) == []


@fuzzed
def test_of_changed_frames_only_those_before_the_change_are_read(random):
    frames = some_frames(random)
    bodies = [frame[12:-32] for frame in frames]
    assert read_bodies(FrameReader(KEY), b"".join(frames), random) == bodies
    found = read_bodies(FrameReader(KEY), mangled(frames, random), random)
    assert found == bodies[: len(found)]


@fuzzed
def test_requests_are_read_as_they_were_sent_or_not_at_all(random):
    request = some_request(random)
    (body,) = FrameReader(KEY).feed(bytes(FrameWriter(KEY).frame(request)))
    sent = bytes(body)
    assert msgspec.msgpack.encode(read_request(sent)) == sent
    for read in (read_request, read_message):
        with contextlib.suppress(ProtocolError):
            read(damaged(sent, random))


@pytest.fixture(scope="module")
def served():
    """A server and a client. Refusals are not shown; any other error of the package or of asyncio fails the tests.

    Who cancels a scope without being in it is told, and no error.
    """
    loggers = [logging.getLogger(name) for name in ("sglang_reshard.control", "asyncio")]
    broken = logging.handlers.BufferingHandler(1000)
    broken.setLevel(logging.WARNING)
    server.refusals.setLevel(logging.ERROR)
    for logger in loggers:
        logger.addHandler(broken)
    control_server = ControlServer.open()
    control_server.quota._max_bytes = 1 << 24
    with ControlClient(control_server.address, SOON_S) as client:
        yield control_server, client
    control_server.close()
    for logger in loggers:
        logger.removeHandler(broken)
    server.refusals.setLevel(logging.NOTSET)
    assert [record.getMessage() for record in broken.buffer] == []


def check_serves(control_server, client, before):
    assert client.add("served", 1) == before + 1
    with ControlClient(control_server.address, SOON_S) as other:
        assert other.add("served", 0) == before + 1
    assert control_server._thread.is_alive()


def visit(control_server):
    return socket.create_connection((control_server.address.host, control_server.address.port), SOON_S)


@fuzzed
def test_a_server_goes_on_serving_whatever_strangers_say(served, random):
    control_server, client = served
    before = client.add("served", 0)
    opening = MAGIC + random.randbytes(32)
    with visit(control_server) as stranger, contextlib.suppress(OSError):
        stranger.sendall(random.choice((b"", opening[: random.randrange(40)], opening)))
        stranger.sendall(random.randbytes(random.randrange(200)))
        if random.random() < 0.5:
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
    check_serves(control_server, client, before)


@fuzzed
def test_a_server_goes_on_serving_whatever_those_say_who_know_the_key(served, random):
    control_server, client = served
    before = client.add("served", 0)
    with visit(control_server) as member, contextlib.suppress(OSError):
        nonce = random.randbytes(32)
        member.sendall(MAGIC + nonce)
        answer = member.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        key = control_server.address.secret()
        writer = directions(key, b"client", b"server", nonce, answer[:32])[0]
        said = [writer.frame((0, "hello", (random.choice(("a", "b", "")),)))]
        said += [writer.frame(some_request(random)) for _ in range(random.randint(0, 12))]
        if random.random() < 0.2:
            said.append(writer.frame((1, "set", (random.choice(({"k": "text"}, {"k": 1}, None, ["k"])),))))
        member.sendall(proof(key, b"client", nonce, answer[:32]))
        member.sendall(b"".join(said) if random.random() < 0.8 else mangled(said, random))
        if random.random() < 0.5:
            member.shutdown(socket.SHUT_WR)
            while member.recv(1 << 16):
                pass
    check_serves(control_server, client, before)
