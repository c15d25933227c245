"""Many updates in a row: descriptors, mapped shared memory and resident memory stay flat on both sides."""

from pathlib import Path

import psutil
import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.left_behind import torch_segments
from support.sweep import SWEEP, sweep
from support.toy import ToyRank, checkpoint
from support.world import run_world

WARM, UPDATES = 20, 1000 if SWEEP else 300
MOVES_EVERY = 50  # updates, after which the trainer has other storages


def held():
    """Open descriptors, mappings of memory that has no name any more, and resident bytes."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    process = psutil.Process()
    return process.num_fds(), sum("(deleted)" in line for line in mappings), process.memory_info().rss


def train(trainer, transport):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport=transport)
    state = checkpoint(0)
    seen = []
    for update in range(UPDATES):
        if update % MOVES_EVERY == 0:
            state = {name: tensor.clone() for name, tensor in state.items()}
        state["norm.weight"].fill_(update)
        sender.update(state.items())
        seen.append(held())
    sender.close()
    return seen[WARM], seen[-1]


def serve(rank, size, requests, transport):
    model = ToyRank(rank, size)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    seen = []
    for update, request in enumerate(requests):
        requests.answer(receiver.update(request))
        assert model.norm.eq(update).all()
        seen.append(held())
    return seen[WARM], seen[-1]


@pytest.mark.parametrize("transport", [sweep("broadcast"), sweep("ipc"), "p2p"])
def test_nothing_grows(transport):
    before = torch_segments()
    trainers, engines = run_world(2, 2, train, serve, transport, deadline_s=240)
    for warm, last in (*trainers, *engines):
        assert last[0] <= warm[0]
        assert last[1] <= warm[1]
        assert last[2] - warm[2] < 4 << 20
    assert torch_segments() <= before
