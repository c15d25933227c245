"""Whatever bytes come over a connection: they open to what was sealed, or they are refused. Nothing else happens."""

import contextlib
import logging.handlers
import socket
from random import Random

import msgspec
import pytest

from fuzz.arbitrary import damaged, value_of
from fuzz.settings import fuzzed
from sglang_reshard.control import ControlClient, ControlServer, protocol
from sglang_reshard.control.framing import (
    ANSWER_BYTES,
    MAGIC,
    FrameReader,
    FrameWriter,
    ProtocolError,
    direction_key,
    proof,
)
from sglang_reshard.control.protocol import Hello, read_reply, read_request

KEY = bytes(range(32))
SOON_S = 20.0


def opened(opener: FrameReader, stream: bytes, random: Random) -> list[bytes]:
    """What opens of a stream that comes in pieces, until it is refused or ends."""
    bodies, at = [], 0
    with contextlib.suppress(ProtocolError):
        while at < len(stream):
            size = random.choice((1, 3, 100, 10_000))
            bodies += map(bytes, opener.open(stream[at : at + size]))
            at += size
    return bodies


def some_frames(random: Random) -> list[bytes]:
    sealer = FrameWriter(KEY)
    return [bytes(sealer.seal(some_request(random))) for _ in range(random.randint(1, 4))]


def some_request(random: Random) -> protocol.Request:
    return value_of(random.choice(protocol.Request.__args__), random)


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
def test_arbitrary_bytes_never_open(random):
    assert opened(FrameReader(KEY), random.randbytes(random.choice((0, 3, 44, 500, 5000))), random) == []


@fuzzed
def test_of_changed_frames_only_those_before_the_change_open(random):
    frames = some_frames(random)
    bodies = [frame[12:-32] for frame in frames]
    assert opened(FrameReader(KEY), b"".join(frames), random) == bodies
    found = opened(FrameReader(KEY), mangled(frames, random), random)
    assert found == bodies[: len(found)]


@fuzzed
def test_requests_are_read_as_they_were_sealed_or_not_at_all(random):
    request = some_request(random)
    (body,) = FrameReader(KEY).open(bytes(FrameWriter(KEY).seal(request)))
    sealed = bytes(body)
    assert msgspec.msgpack.encode(read_request(sealed)) == sealed
    for reader in (read_request, read_reply):
        with contextlib.suppress(ProtocolError):
            reader(damaged(sealed, random))


@pytest.fixture(scope="module")
def served():
    """A hub and a line to it. Refusals are not shown; an error that is not a refusal fails the tests."""
    logger, broken = logging.getLogger("sglang_reshard.control"), logging.handlers.BufferingHandler(1000)
    logging.getLogger("sglang_reshard.control.rate_limited_log").setLevel(logging.ERROR)
    logger.addHandler(broken)
    hub = ControlServer.open(stored_bytes=1 << 24)
    with ControlClient(hub.address, SOON_S) as line:
        yield hub, line
    hub.close()
    logger.removeHandler(broken)
    logging.getLogger("sglang_reshard.control.rate_limited_log").setLevel(logging.NOTSET)
    assert [record.getMessage() for record in broken.buffer] == []


def serves(hub, line, before):
    assert line.add("served", 1) == before + 1
    with ControlClient(hub.address, SOON_S) as other:
        assert other.add("served", 0) == before + 1
    assert hub._thread.is_alive()


def visit(hub):
    return socket.create_connection((hub.address.host, hub.address.port), SOON_S)


@fuzzed
def test_a_hub_goes_on_serving_whatever_strangers_say(served, random):
    hub, line = served
    before = line.add("served", 0)
    opening = MAGIC + random.randbytes(32)
    with visit(hub) as stranger, contextlib.suppress(OSError):
        stranger.sendall(random.choice((b"", opening[: random.randrange(40)], opening)))
        stranger.sendall(random.randbytes(random.randrange(200)))
        if random.random() < 0.5:
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
    serves(hub, line, before)


@fuzzed
def test_a_hub_goes_on_serving_whatever_those_say_who_know_the_key(served, random):
    hub, line = served
    before = line.add("served", 0)
    with visit(hub) as member, contextlib.suppress(OSError):
        nonce = random.randbytes(32)
        member.sendall(MAGIC + nonce)
        answer = member.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        key = hub.address.secret()
        sealer = FrameWriter(direction_key(key, b"line", nonce, answer[:32]))
        said = [sealer.seal(Hello(0, random.choice(("a", "b", ""))))]
        said += [sealer.seal(some_request(random)) for _ in range(random.randint(0, 12))]
        if random.random() < 0.2:
            said.append(sealer.seal(protocol.Set(1, random.choice(({"k": "text"}, {"k": 1}, None, ["k"])))))
        member.sendall(proof(key, b"line", nonce, answer[:32]))
        member.sendall(b"".join(said) if random.random() < 0.8 else mangled(said, random))
        if random.random() < 0.5:
            member.shutdown(socket.SHUT_WR)
            while member.recv(1 << 16):
                pass
    serves(hub, line, before)
