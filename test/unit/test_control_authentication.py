"""Whoever does not know the session's key, and whoever meddles with a connection of one who does."""

import contextlib
import itertools
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from sglang_reshard.control import Address, ControlClient, ControlServer, server
from sglang_reshard.control.connection import (
    ANSWER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    FrameReader,
    FrameWriter,
    directions,
    proof,
    read_message,
    read_request,
)
from sglang_reshard.control.protocol import ProtocolError
from sglang_reshard.errors import ConnectionLost, Unauthorized

SOON_S = 60.0
HELLO = (0, "hello", ("s",))
TOO_LONG = MAX_FRAME_BYTES + 41


@pytest.fixture
def host(monkeypatch):
    """A server whose every refusal is logged, and that serves as before in the end."""
    monkeypatch.setattr(server, "_LOG_EVERY_S", 0.0)
    host = ControlServer.open()
    with ControlClient(host.address, SOON_S) as client:
        yield host
        client.set({"still": b"served"})
        assert client.get(["still"], SOON_S) == [b"served"]
    host.close()


def hangs_up(connection):
    """What comes before it does."""
    connection.settimeout(SOON_S)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            got += piece
    return got


def says(told, what):
    end = time.monotonic() + SOON_S
    while what not in told.text and time.monotonic() < end:
        time.sleep(0.01)
    assert what in told.text
    assert all(record.levelno == logging.WARNING for record in told.records)


def knock(address, *pieces):
    """A stranger that says this; what it hears."""
    with socket.create_connection((address.host, address.port), SOON_S) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        return hangs_up(connection)


def authentic(address):
    """A connection that has proved itself, done by hand, what seals for it, and what it has said."""
    connection = socket.create_connection((address.host, address.port), SOON_S)
    nonce, key = b"n" * 32, address.secret()
    connection.sendall(MAGIC + nonce)
    answer = b""
    while len(answer) < ANSWER_BYTES:
        answer += connection.recv(ANSWER_BYTES - len(answer))
    nonces = nonce, answer[:32]
    own = proof(key, b"client", *nonces)
    connection.sendall(own)
    return connection, directions(key, b"client", b"server", *nonces)[0], (MAGIC + nonce, own)


def test_garbage_is_refused(host, told):
    assert knock(host.address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    says(told, "it uses another protocol, or another version of it")
    assert "127.0.0.1:" in told.text


def test_a_wrong_proof_is_refused_and_nothing_after_it_is_read(host, told):
    frame = FrameWriter(bytes(32)).frame(HELLO)
    heard = knock(host.address, MAGIC + b"n" * 32, b"p" * 32, frame * 1000)
    assert len(heard) in (0, ANSWER_BYTES)  # 0 where what it did not read resets the connection
    says(told, "it does not have the session's key")


def test_a_wrong_key_is_refused_by_both_sides(host, told):
    wrong = type(host.address)(host.address.session, host.address.host, host.address.port, "00" * 32)
    with pytest.raises(Unauthorized, match="does not have the key"):
        ControlClient(wrong, SOON_S)
    says(told, "it disconnected during the handshake")
    with pytest.raises(Unauthorized, match="hexadecimal"):
        ControlClient(msgspec.structs.replace(wrong, key="not a key"), SOON_S)


def test_a_host_that_does_not_know_the_key_is_not_told_anything():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ControlServer.open()
        address.close()
        address = type(address.address)("s", "127.0.0.1", listener.getsockname()[1], address.address.key)
        heard = []

        def pose():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"h" * ANSWER_BYTES)
                heard.append(hangs_up(connection))

        with ThreadPoolExecutor() as threads:
            posing = threads.submit(pose)
            with pytest.raises(Unauthorized, match="another program has taken the port"):
                ControlClient(address, SOON_S)
            posing.result(SOON_S)
        assert len(heard[0]) == len(MAGIC) + NONCE_BYTES


def test_who_never_proves_itself_is_turned_away(host, told, monkeypatch):
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.3)
    start = time.monotonic()
    assert knock(host.address, MAGIC) == b""
    assert time.monotonic() - start >= 0.3
    says(told, "its handshake took too long")


def test_many_who_say_nothing_do_not_keep_others_out_for_long(host, monkeypatch):
    monkeypatch.setattr(server, "_HANDSHAKE_S", 2 * SOON_S)
    monkeypatch.setattr(server, "_HANDSHAKE_WHEN_FULL_S", 0.5)
    idle = [socket.create_connection((host.address.host, host.address.port)) for _ in range(2 * server._MAX_HANDSHAKES)]
    try:
        time.sleep(0.1)
        assert len(host._handshakes) == server._MAX_HANDSHAKES
        with ControlClient(host.address, SOON_S) as client:
            assert client.num_keys() == 0
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("meant", "why"),
    [
        (lambda frame: TOO_LONG.to_bytes(4, "big") + frame[4:], f"a frame of {TOO_LONG} bytes is out of range"),
        (lambda frame: b"\0\0\0\x27" + frame[4:], "a frame of 39 bytes is out of range"),
        (lambda frame: frame[:-1], "it disconnected in the middle of a frame"),
        (lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]), "not authentic"),
        (lambda frame: bytes(frame) * 2, "repeated or lost"),
    ],
    ids=["oversized", "undersized", "truncated", "changed", "repeated"],
)
def test_bad_frames_of_one_who_knows_the_key_end_its_connection(host, told, meant, why):
    connection, writer, _ = authentic(host.address)
    with connection:
        frame = meant(writer.frame(HELLO))
        connection.sendall(frame)
        connection.shutdown(socket.SHUT_WR)
        hangs_up(connection)
    says(told, why)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (((0, "leave", ("s",)),), "its first request was not hello"),
        (((0, "end_session", ()),), "its first request was not hello"),
        ((HELLO, (1, "hello", ("t",))), "a second hello"),
        ((HELLO, (1, "ok", ())), "unknown operation 'ok'"),
        ((HELLO, (1, "disconnected", ("x",))), "unknown operation 'disconnected'"),
        ((HELLO, (1, "set", ({"x": "text"},))), "Expected"),
    ],
)
def test_words_that_have_no_place_end_a_connection(host, told, words, why):
    connection, writer, _ = authentic(host.address)
    with connection:
        for word in words:
            connection.sendall(writer.frame(word))
        hangs_up(connection)
    says(told, why)


def test_a_connection_that_was_recorded_cannot_be_repeated(host, told):
    connection, _, recorded = authentic(host.address)
    connection.close()
    heard = knock(host.address, *recorded)
    assert len(heard) in (0, ANSWER_BYTES)
    says(told, "it does not have the session's key")


def test_frames_of_one_connection_are_of_no_use_in_another(host, told):
    (first, of_first, _), (second, of_second, _) = (authentic(host.address) for _ in range(2))
    with first, second:
        second.sendall(of_second.frame(HELLO))
        of_first.frame(HELLO)
        second.sendall(of_first.frame((1, "add", ("n", 5))))
        hangs_up(second)
    says(told, "not authentic")


def test_who_meddles_with_what_a_server_says_is_noticed_by_the_client(host):
    with ControlClient(host.address, SOON_S) as client:
        client._reader._key = bytes(32)
        with pytest.raises(ConnectionLost, match="it sent invalid data: a frame is not authentic"):
            client.num_keys()


def test_refusals_do_not_fill_the_log_and_tell_no_secret(told, monkeypatch):
    monkeypatch.setattr(server, "_LOG_EVERY_S", 0.5)
    host = ControlServer.open()
    for _ in range(50):
        knock(host.address, b"garbage!")
    time.sleep(0.5)
    knock(host.address, b"garbage!")
    says(told, "more refusals were not logged")
    host.close()
    assert len(told.records) <= 5
    assert host.address.key not in told.text + repr(host.address) + str(vars(host))


def test_an_address_does_not_show_its_key():
    address = Address("session", "127.0.0.1", 5000, "5ec2e7" * 10)
    named = address.named("update")
    assert (named.session, named.port, named.key) == ("session/update", 5000, address.key)
    for shown in (repr(address), str(address), f"{[named]}", repr(address.__rich_repr__())):
        assert "5ec2e7" not in shown


def test_keys_are_of_a_side_and_of_a_connection():
    secrets, nonces = (bytes(range(32)), bytes(32)), (b"a" * 32, b"b" * 32)
    keys = set()
    for key, a, b in itertools.product(secrets, nonces, nonces):
        for side, other in ((b"client", b"server"), (b"server", b"client")):
            writer, reader = directions(key, side, other, a, b)
            keys |= {proof(key, side, a, b), writer._key}
            with pytest.raises(ProtocolError, match="not authentic"):
                reader.feed(writer.frame(HELLO))
    assert len(keys) == 2**5


def test_frames_of_the_largest_size_are_waited_for():
    assert FrameReader(bytes(32)).feed((TOO_LONG - 1).to_bytes(4, "big")) == []


@pytest.mark.parametrize(
    ("read", "messages"),
    [
        (
            read_request,
            [
                [1, "set"],
                [1, "set", [{}, "more"]],
                [1, "set", [{}], "more"],
                ["1", "set", [{}]],
                [1, "add", ["key", True]],
                [1, "__init__", []],
                [1, 1, []],
                {"set": 1},
                ["Result", 1, None],
            ],
        ),
        (read_message, [[1, "set", [{}]], ["Result", 1], ["Result", 1, "text"], ["Event", "s", "why", 1]]),
    ],
)
def test_messages_of_another_shape_are_not_read(read, messages):
    for message in messages:
        with pytest.raises(ProtocolError):
            read(msgspec.msgpack.encode(message))
