"""Only frames that the other side made, in their order, in this connection, are accepted."""

import itertools

import msgspec
import pytest

from sglang_reshard.control import Address, connection
from sglang_reshard.control.connection import (
    MAX_FRAME_BYTES,
    FrameReader,
    FrameWriter,
    directions,
    proof,
    read_message,
    read_request,
)
from sglang_reshard.control.protocol import Event, ProtocolError, QuotaExceeded, Refused, Result

KEY = bytes(range(32))


def frames_of(*messages, key=KEY):
    writer = FrameWriter(key)
    return [bytes(writer.frame(message)) for message in messages]


def set_request(number, items):
    return number, "set", (items,)


def test_frames_open_in_whatever_pieces_they_come():
    messages = [set_request(n, {"k": bytes(n)}) for n in range(40)]
    stream = b"".join(frames_of(*messages))
    for step in (1, 7, 1000, len(stream)):
        reader = FrameReader(KEY)
        bodies = [b for at in range(0, len(stream), step) for b in reader.feed(stream[at : at + step])]
        assert [read_request(body) for body in bodies] == messages
        assert not reader.unfinished_bytes


def test_a_frame_is_incomplete_until_its_last_byte():
    (frame,) = frames_of(Result(1, None))
    reader = FrameReader(KEY)
    assert not reader.unfinished_bytes
    for byte in frame[:-1]:
        assert reader.feed(bytes([byte])) == []
        assert reader.unfinished_bytes
    assert len(reader.feed(frame[-1:])) == 1
    assert not reader.unfinished_bytes


@pytest.mark.parametrize("order", [order for order in itertools.product(range(3), repeat=3) if order != (0, 1, 2)])
def test_frames_that_are_repeated_or_lost_or_swapped_are_refused(order):
    made = frames_of(*(set_request(n, {}) for n in range(3)))
    reader = FrameReader(KEY)
    with pytest.raises(ProtocolError, match="repeated or lost"):
        reader.feed(b"".join(made[n] for n in order))


def test_every_bit_counts():
    (frame,) = frames_of(set_request(1, {"key": b"value"}))
    for bit in range(8 * len(frame)):
        bent = bytearray(frame)
        bent[bit // 8] ^= 1 << bit % 8
        reader = FrameReader(KEY)
        try:
            assert reader.feed(bent) == []  # it says that it is longer, and never ends
            assert reader.unfinished_bytes
        except ProtocolError:
            pass


def test_lengths_are_refused_before_anything_is_kept_for_them():
    for length in (0, 39, MAX_FRAME_BYTES + 41, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"{length} bytes"):
            FrameReader(KEY).feed(length.to_bytes(4, "big"))
    assert FrameReader(KEY).feed((MAX_FRAME_BYTES + 40).to_bytes(4, "big")) == []


def test_too_large_a_message_is_not_sent_and_does_not_count(monkeypatch):
    monkeypatch.setattr(connection, "MAX_FRAME_BYTES", 100)
    writer = FrameWriter(KEY)
    with pytest.raises(QuotaExceeded, match="limit of 100"):
        writer.frame(set_request(1, {"k": bytes(101)}))
    (body,) = FrameReader(KEY).feed(writer.frame(Result(1, None)))
    assert read_message(body) == Result(1, None)


def test_keys_are_of_a_side_and_of_a_connection():
    def frame_key(key, side, a, b):
        writer, reader = directions(key, side, {b"client": b"server", b"server": b"client"}[side], a, b)
        assert writer._key != reader._key
        return writer._key

    keys = {
        make(key, side, a, b)
        for make in (proof, frame_key)
        for key in (KEY, KEY[::-1])
        for side in (b"client", b"server")
        for a in (b"a" * 32, b"b" * 32)
        for b in (b"a" * 32, b"b" * 32)
    }
    assert len(keys) == 2**5
    (frame,) = frames_of(Result(1, None))
    with pytest.raises(ProtocolError, match="not authentic"):
        FrameReader(KEY[::-1]).feed(frame)


@pytest.mark.parametrize(
    "request_",
    [
        [1, "set"],
        [1, "set", []],
        [1, "set", {}],
        [1, "set", [{}, "more"]],
        [1, "set", [{}], "more"],
        ["1", "set", [{}]],
        [1, "set", [{"key": "text"}]],
        [1, "set", [{"key": 1}]],
        [1, "set", [[]]],
        [1, "add", ["key", 1.5]],
        [1, "add", ["key", True]],
        [1, "num_keys", [1]],
        [1, "drop", []],
        [1, "__init__", []],
        [1, "disconnected", []],
        [1, 1, []],
        {"set": 1},
        5,
        ["Result", 1, None],
    ],
    ids=str,
)
def test_requests_of_another_shape_are_not_read(request_):
    with pytest.raises(ProtocolError):
        read_request(msgspec.msgpack.encode(request_))


def test_replies_of_another_shape_are_not_read():
    for message in (
        set_request(1, {}),
        ["Result", 1],
        ["Result", 1, "text"],
        ["Event", "s", "why", 1],
        ["Event", 1, "why"],
    ):
        with pytest.raises(ProtocolError):
            read_message(msgspec.msgpack.encode(message))
    event = Event("s", "why")
    assert read_message(msgspec.msgpack.encode(event)) == event
    assert read_message(msgspec.msgpack.encode(Refused(1, "no"))) == Refused(1, "no")


def test_an_address_does_not_show_its_key():
    address = Address("session", "127.0.0.1", 5000, "5ec2" * 16)
    named = address.named("update")
    assert (named.session, named.port, named.key) == ("session/update", 5000, address.key)
    for shown in (repr(address), str(address), f"{[named]}", repr(address.__rich_repr__())):
        assert "5ec2" not in shown
    assert msgspec.json.decode(msgspec.json.encode(address), type=Address) == address
