"""What an engine rank says of its progress, and what those who wait for it make of it."""

import pytest
import torch

from sglang_reshard.routes.nixl.remote_shards import RemoteShard
from sglang_reshard.routes.relay import progress as relay
from sglang_reshard.routes.relay.offers import MAX_UPDATE
from sglang_reshard.routes.relay.progress import Progress, RelayGate, RelayLost

CHECK = 0xABCDE


class Reader:
    """Reads another rank's word as NIXL does: what was there when the read was started arrives some time later."""

    def __init__(self, progress):
        self.progress, self.arrives = progress, True

    def register(self, storages):
        (self.own,) = storages

    def shard(self, _peer, _tensor):
        return RemoteShard("DRAM", 0, self.progress.word.data_ptr(), (1,))

    def prepare(self, _peer, _remote, _local):
        return "read"

    def start(self, _peer, _reads):
        self.seen = self.progress.word.clone()

    def are_done(self, _peer, _reads):
        if self.arrives:
            torch.tensor([], dtype=torch.int64).set_(self.own).copy_(self.seen)
        return self.arrives


@pytest.fixture
def progress():
    return Progress("engine rank 1")


@pytest.fixture
def gate(progress, monkeypatch):
    monkeypatch.setattr(relay, "_MIN_POLL_S", 0.0)
    monkeypatch.setattr(relay, "_MAX_POLL_S", 0.0)
    found = RelayGate(Reader(progress), "engine rank 1 of b", "b", CHECK)
    found.begin(5)
    return found


def opens(gate, needed, polls=4):
    return any([gate.is_open(needed) for _ in range(polls)])


def until(condition):
    while not condition():
        pass


@pytest.mark.parametrize("update", [1, 5, MAX_UPDATE])
def test_a_gate_opens_as_tensors_are_complete(gate, progress, update):
    gate.begin(update)
    progress.begin(update - 1, CHECK)
    progress.advance(9)
    assert not opens(gate, 1), "those are of the update before"
    progress.begin(update, CHECK)
    assert not opens(gate, 1)
    progress.advance(3)
    assert opens(gate, 3)
    assert not opens(gate, 4)
    assert opens(gate, 2), "not asked again"


@pytest.mark.parametrize(
    ("update", "check", "stops", "says"),
    [
        (5, CHECK, True, "b was not updated"),
        (5, CHECK ^ 1, False, "b made a different plan"),
        (6, CHECK, False, "b made a different plan"),
    ],
)
def test_one_that_failed_or_plans_otherwise_is_lost_at_once(gate, progress, update, check, stops, says):
    progress.begin(update, check)
    if stops:
        progress.stop(update)
    progress.advance(7)
    with pytest.raises(RelayLost, match=says) as lost:
        opens(gate, 1)
    assert lost.value.engine == "b"


def test_a_failure_of_an_earlier_update_says_nothing(gate, progress):
    progress.begin(4, CHECK)
    progress.stop(4)
    assert not opens(gate, 1)
    progress.begin(5, CHECK)
    progress.advance(1)
    assert opens(gate, 1)


def test_what_an_earlier_trainer_left_is_forgotten(gate, progress):
    progress.begin(900, CHECK)
    progress.reset()
    assert not opens(gate, 1)


def test_no_progress_is_waited_for_so_long(gate, progress, monkeypatch):
    monkeypatch.setattr(relay, "STALLED_S", 0.05)
    progress.begin(5, CHECK)
    with pytest.raises(RelayLost, match=r"b has read nothing for 0.05 s"):
        until(lambda: gate.is_open(1))


def test_one_that_does_not_answer_is_lost(gate, progress, monkeypatch):
    monkeypatch.setattr(relay, "STALLED_S", 0.05)
    progress.begin(5, CHECK)
    progress.advance(1)
    assert opens(gate, 1)
    gate._reader.arrives = False
    with pytest.raises(RelayLost, match=r"b has not answered for 0.05 s"):
        until(gate.confirm)


def test_it_is_asked_again_once_all_was_read(gate, progress):
    progress.begin(5, CHECK)
    progress.advance(1)
    assert opens(gate, 1)
    gate.is_open(2)  # starts a read of the word, which sees that all is well
    progress.stop(6)
    with pytest.raises(RelayLost, match="b was not updated"):
        until(gate.confirm)
