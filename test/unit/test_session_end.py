"""Whoever ends a session, or dies in it, has its memory back: engine ranks let go of what they mapped."""

import threading
import time
from pathlib import Path

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import Address
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.protocol.session import Session
from support.ready import CONTEXT
from support.toy import ToyRank, checkpoint
from support.world import run_world


def mappings():
    """Of memory without a name, which trainer ranks' shards are in."""
    return sum("(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


def train(trainer, transport):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport=transport)
    state = checkpoint(1)
    sender.update(state.items())
    sender.update(state.items())
    sender.close()


def serve(rank, size, requests, transport):
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size)), rank, size, torch.device("cpu"))
    before, during = mappings(), 0
    for request in requests:
        requests.answer(receiver.update(request))
        during = max(during, mappings())
    end = time.monotonic() + 20
    while mappings() > before and time.monotonic() < end:
        time.sleep(0.05)
    return before, during, mappings(), receiver._executor.transfers.last is None


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_engine_ranks_let_go_when_the_sender_is_closed(transport):
    _, engines = run_world(2, 2, train, serve, transport)
    for before, during, after, forgotten in engines:
        assert forgotten
        assert after == before
        assert (during > before) == (transport == "ipc")


def keep_session(link):
    session = Session.host()
    a = session.address
    link.send((a.session, a.host, a.port, a.key))
    if link.recv() == "end":
        session.end(1)
        link.recv()


class Noticing:
    def __init__(self, noticed):
        self.noticed = noticed

    def ended(self, session):
        assert session is not None
        self.noticed.set()


@pytest.mark.parametrize("way", ["end", "kill"])
def test_the_end_is_noticed(way):
    link, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=keep_session, args=(theirs,), daemon=True)
    process.start()
    noticed = threading.Event()
    try:
        session = Session.join(Address(*link.recv()), timeout_s=60)
        engine = Noticing(noticed)
        session.on_engine_end(0, engine.ended)
        assert not noticed.wait(0.5)
        if way == "end":
            link.send("end")
        else:
            process.kill()
        assert noticed.wait(60)
    finally:
        process.kill()
        process.join()
