"""Without NIXL an update by it is refused before a byte is written, saying what to install and where."""

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import EngineRefused
from support.toy import ToyRank, checkpoint
from support.toy_trainers import State
from support.world import run_world


def train(trainer):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport="nixl")
    state = State((2,), "fsdp", torch.float32)
    state.become(1)
    with pytest.raises(EngineRefused) as refused:
        sender.update(state.given)
    sender.close()
    return str(refused.value)


def serve(rank, size, requests):
    model = ToyRank(rank, size, torch.float32)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    model.load_weights(checkpoint(0, torch.float32).items())
    before = [parameter.clone() for parameter in model.parameters()]
    for request in requests:
        output = receiver.update(request)
        requests.answer(output)
        assert not output.torn
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_update_by_nixl_without_it_is_refused_with_the_cure():
    told, _ = run_world(2, 2, train, serve)
    assert len(set(told)) == 1
    assert "NIXL cannot be imported" in told[0]
    assert "pip install 'sglang-reshard[nixl]'" in told[0]
