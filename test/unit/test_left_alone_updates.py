"""Whole updates of engine ranks started on dummy weights: what is left alone is named once, in the first report."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard.errors import EngineRefused
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.initial_values import keep_initial_values
from sglang_reshard.trace.stock_load import EngineStart
from support.toy_serving import answered, receiver_of
from support.world import run_world

TRAINERS, ENGINES, ROWS = 2, 2, 8


class Rank(torch.nn.Module):
    """Half of a matrix; a bias of which no checkpoint has any element; a scalar in a buffer."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.weight = torch.nn.Parameter(torch.zeros(ROWS // ENGINES, 3))
        self.bias = torch.nn.Parameter(torch.full((3,), 5.0))
        self.register_buffer("scalar", torch.ones(1))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "weight":
                self.weight.data.copy_(tensor.chunk(ENGINES)[self.rank])
            elif name == "scalar":
                self.scalar.copy_(tensor)


def train(trainer, staged):
    sender = trainer.sender(bucket_bytes=1 << 20)
    mesh, seen = init_device_mesh("cpu", (TRAINERS,)), []
    weight, scalar = torch.arange(ROWS * 3.0).reshape(ROWS, 3), torch.tensor([7.0])
    shards = {"weight": distribute_tensor(weight, mesh, [Shard(0)])}
    with pytest.raises(EngineRefused, match=r"scalar is a buffer .*state_dict\(\)"):
        sender.update(shards.items(), weight_version="none", staged=staged)
    for version in range(3):
        report = sender.update((shards | {"scalar": scalar}).items(), weight_version=str(version), staged=staged)
        seen.append(report.message)
    return seen


def serve(rank, size, requests, _staged):
    model = Rank(rank)
    with keep_initial_values(model), torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.uniform_(-1e-3, 1e-3)
    specs = [TensorSpec("weight", (ROWS, 3), "float32"), TensorSpec("scalar", (1,), "float32")]
    receiver = receiver_of(model, rank, size, start=lambda: EngineStart(specs))
    live = lambda: (model.bias.tolist(), model.scalar.item(), model.weight[0, 0].item())  # noqa: E731
    return [live() for _ in answered(receiver, requests)]


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_left_alone_is_as_constructed_and_named_once(staged):
    messages, ranks = run_world(TRAINERS, ENGINES, train, serve, staged)
    for of_rank in messages:
        assert of_rank[0] == "no tensor of the engine's checkpoint reaches these, so they keep their values: bias"
        assert of_rank[1:] == ["", ""]
    for rank, (refused, *updated) in enumerate(ranks):
        bias, scalar, weight = refused
        assert (bias != [5.0] * 3, scalar, abs(weight) < 1) == (True, 1.0, True)
        assert updated == [([5.0] * 3, 7.0, float(rank * ROWS // ENGINES * 3))] * 3
