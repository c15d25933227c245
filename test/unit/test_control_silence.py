"""How long the other end of a connection has acknowledged nothing, from what the kernel says of it."""

import contextlib
import socket
import struct

import pytest

from sglang_reshard.control.connection import configure, silence


class Connection:
    """A connection of which the kernel says so: segments not acknowledged, milliseconds since the last that was."""

    def __init__(self, under_way, since_ms):
        self._fields = [0] * 13
        self._fields[4], self._fields[12] = under_way, since_ms

    def getsockopt(self, level, option, size):
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return struct.pack("=8x13I", *self._fields)[:size]


@pytest.mark.parametrize(("under_way", "since_ms", "says"), [(0, 9000, ""), (1, 9000, "for 9 s"), (20, 500, "")])
def test_an_end_is_silent_since_its_last_word_if_something_is_under_way(under_way, since_ms, says):
    assert silence(Connection(under_way, since_ms)).endswith(says)
    assert bool(silence(Connection(under_way, since_ms))) == bool(says)


def test_a_process_that_does_not_read_is_not_silent():
    """The kernel's own word: its host acknowledges what it does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = configure(socket.create_connection(server.getsockname()))
        theirs, _ = server.accept()
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        assert not silence(ours)
        ours.close()
        theirs.close()
