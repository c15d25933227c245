"""Whoever ends a session, or dies in it, has its memory back: engine ranks let go of what they mapped."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world


def mappings():
    """Of memory without a name, which trainer ranks' shards are in."""
    return sum("(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


def train(trainer, transport, ends):
    sender = trainer.sender(transport=transport)
    state = checkpoint(1)
    sender.update(state.items())
    sender.update(state.items())
    if ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def serve(rank, size, requests, *_):
    receiver = receiver_of(ToyRank(rank, size))
    before, during = mappings(), 0
    with contextlib.suppress(EOFError):  # of the trainer that was killed
        for request in requests:
            requests.answer(receiver.update(request))
            during = max(during, mappings())
    transfers, end = receiver._executor.transfers, time.monotonic() + 20
    while (mappings() > before or transfers.last is not None) and time.monotonic() < end:
        time.sleep(0.05)
    return before, during, mappings(), transfers.last is None


@pytest.mark.parametrize(("transport", "ends"), [("ipc", "closed"), ("p2p", "closed"), ("ipc", "killed")])
def test_engine_ranks_let_go_when_the_sender_is_closed_or_dies(transport, ends):
    killed = ["trainer rank 0", "trainer rank 1"] if ends == "killed" else []
    _, engines = run_world(2, 2, train, serve, transport, ends, killed=killed)
    for before, during, after, forgotten in engines:
        assert forgotten
        assert after == before
        assert (during > before) == (transport == "ipc")
