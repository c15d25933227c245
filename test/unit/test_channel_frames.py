"""Frames: only what the other side sealed, in its order, in this connection, is opened."""

import itertools

import msgspec
import pytest

from sglang_reshard.control import Address, framing
from sglang_reshard.control.framing import (
    MAX_FRAME_BYTES,
    FrameReader,
    FrameTooLarge,
    FrameWriter,
    ProtocolError,
    direction_key,
    proof,
)
from sglang_reshard.control.protocol import Ok, Refused, Set, read_reply, read_request

KEY = bytes(range(32))


def sealed(*messages, key=KEY):
    sealer = FrameWriter(key)
    return [bytes(sealer.seal(message)) for message in messages]


def test_frames_open_in_whatever_pieces_they_come():
    messages = [Set(n, {"k": bytes(n)}) for n in range(40)]
    stream = b"".join(sealed(*messages))
    for step in (1, 7, 1000, len(stream)):
        opener = FrameReader(KEY)
        bodies = [b for at in range(0, len(stream), step) for b in opener.open(stream[at : at + step])]
        assert [read_request(body) for body in bodies] == messages
        assert not opener.broken_off


def test_what_is_missing_is_known():
    (frame,) = sealed(Ok(1))
    opener = FrameReader(KEY)
    assert opener.missing() == 4
    opener.open(frame[:4])
    assert opener.missing() == len(frame) - 4
    opener.open(frame[4:-1])
    assert (opener.missing(), opener.broken_off) == (1, True)


@pytest.mark.parametrize("order", [order for order in itertools.product(range(3), repeat=3) if order != (0, 1, 2)])
def test_frames_that_are_repeated_or_lost_or_swapped_are_refused(order):
    made = sealed(*(Set(n, {}) for n in range(3)))
    opener = FrameReader(KEY)
    with pytest.raises(ProtocolError, match="repeated or lost"):
        opener.open(b"".join(made[n] for n in order))


def test_every_bit_counts():
    (frame,) = sealed(Set(1, {"key": b"value"}))
    for bit in range(8 * len(frame)):
        bent = bytearray(frame)
        bent[bit // 8] ^= 1 << bit % 8
        opener = FrameReader(KEY)
        try:
            assert opener.open(bent) == []  # it says that it is longer, and never ends
            assert opener.missing() > 0
        except ProtocolError:
            pass


def test_lengths_are_refused_before_anything_is_kept_for_them():
    for length in (0, 39, MAX_FRAME_BYTES + 41, 2**32 - 1):
        with pytest.raises(ProtocolError, match=f"{length} bytes"):
            FrameReader(KEY).open(length.to_bytes(4, "big"))
    assert FrameReader(KEY).open((MAX_FRAME_BYTES + 40).to_bytes(4, "big")) == []


def test_too_large_a_message_is_not_sealed_and_does_not_count(monkeypatch):
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 100)
    sealer = FrameWriter(KEY)
    with pytest.raises(FrameTooLarge, match="at most 100"):
        sealer.seal(Set(1, {"k": bytes(101)}))
    (body,) = FrameReader(KEY).open(sealer.seal(Ok(1)))
    assert read_reply(body) == Ok(1)


def test_keys_are_of_a_side_and_of_a_connection():
    keys = {
        make(key, side, a, b)
        for make in (proof, direction_key)
        for key in (KEY, KEY[::-1])
        for side in (b"line", b"hub")
        for a in (b"a" * 32, b"b" * 32)
        for b in (b"a" * 32, b"b" * 32)
    }
    assert len(keys) == 2**5
    (frame,) = sealed(Ok(1))
    with pytest.raises(ProtocolError, match="not authentic"):
        FrameReader(KEY[::-1]).open(frame)


def test_words_of_another_shape_are_not_read():
    for word in (["set", 1], ["set", 1, {}, "more"], ["set", "1", {}], ["drop", 1], {"set": 1}, ["done", 1], 5):
        with pytest.raises(ProtocolError):
            read_request(msgspec.msgpack.encode(word))
    with pytest.raises(ProtocolError):
        read_reply(msgspec.msgpack.encode(Set(1, {})))
    assert read_reply(msgspec.msgpack.encode(Refused(1, "no"))) == Refused(1, "no")


def test_an_address_does_not_show_its_key():
    address = Address("session", "127.0.0.1", 5000, "5ec2e7" * 10)
    named = address.named("update")
    assert (named.session, named.port, named.key) == ("session/update", 5000, address.key)
    for shown in (repr(address), str(address), f"{[named]}", repr(address.__rich_repr__())):
        assert "5ec2e7" not in shown
    assert msgspec.json.decode(msgspec.json.encode(address), type=Address) == address
