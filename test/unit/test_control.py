"""Messages of any length reach every engine rank whole; those of an unchanged update in one exchange."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from sglang_reshard.control import FRAME_BYTES, Control
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.messages import encode

ROOM = FRAME_BYTES - 8  # bytes of a message beside its length


def each_rank(size, run):
    """What `run(control)` gives on every rank; the ranks are threads."""
    store = dist.HashStore()

    def rank(number):
        group = dist.ProcessGroupGloo(store, number, size, timedelta(seconds=20))
        return run(Control(group, number, size))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def message_of(nbytes):
    """A message of that many bytes on the wire, none of them like the next."""
    pattern = bytes(i * 7 % 251 for i in range(nbytes))
    message = next(pattern[:n] for n in range(nbytes, -1, -1) if len(encode(pattern[:n])) <= nbytes)
    assert len(encode(message)) == nbytes
    return message


@pytest.mark.parametrize(
    ("lengths", "exchanges"),
    [
        ((2, 2), 1),  # empty ones
        ((ROOM, ROOM), 1),
        ((ROOM, 2, ROOM - 1), 1),
        ((ROOM + 1, ROOM + 1), 2),
        ((ROOM + 1, 2, ROOM), 2),
        ((2, FRAME_BYTES, 5 * FRAME_BYTES + 3), 2),
        ((100_000,), 2),
    ],
)
def test_every_rank_has_every_message(monkeypatch, lengths, exchanges):
    calls = []
    exchange = Control._exchange
    monkeypatch.setattr(Control, "_exchange", lambda *a: (calls.append(1), exchange(*a))[1])
    messages = [message_of(n) for n in lengths]
    gathered = each_rank(len(lengths), lambda c: c.gather(messages[c.rank], timeout_s=20))
    assert gathered == [messages] * len(lengths)
    assert len(calls) == exchanges * len(lengths)


def test_messages_follow_each_other():
    """A long message leaves nothing behind that the next one could be taken for."""

    def run(c):
        return [c.gather([c.rank] * n, timeout_s=20) for n in (0, 3 * FRAME_BYTES, 1)]

    expected = [[[rank] * n for rank in (0, 1)] for n in (0, 3 * FRAME_BYTES, 1)]
    assert each_rank(2, run) == [expected, expected]


def test_a_rank_that_does_not_come_is_told_of():
    def run(c):
        if c.rank == 0:
            with pytest.raises(DeadlineExceeded, match="engine rank 0: engine rank 1 did not answer within 1 s"):
                c.gather("alone", timeout_s=1)
        return c.rank

    assert each_rank(2, run) == [0, 1]
