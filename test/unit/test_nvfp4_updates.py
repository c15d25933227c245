"""Whole updates in real processes of an NVFP4 model from a trainer in bfloat16, which sends whole weights' scales."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.trace.block_formats import FP8
from sglang_reshard.trace.built_modules import remember
from support import nvfp4
from support.sweep import sweep
from support.toy_repacking import process
from support.world import run_world

ROWS, COLUMNS, LAYERS, TRAINERS, ENGINES = 24, 64, 20, 3, 2
BUCKET_BYTES = 2048


def weights(version):
    generator = torch.Generator().manual_seed(version)
    found = {}
    for n in range(LAYERS):
        weight = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() * (n + 1)
        found[f"layers.{n}.weight"] = weight
        found[f"layers.{n}.weight_scale_2"] = nvfp4.whole_scale(weight)
    return found


class Method:
    """Keeps scales in another order, and their product with the scale of the whole weight."""

    quant_config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)

    def process_weights_after_loading(self, layer):
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data.t().contiguous(), requires_grad=False)
        layer.alpha = torch.nn.Parameter(layer.weight_scale_2.data * 2, requires_grad=False)


class Linear(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.quant_method = Method()
        for name, tensor in {
            "weight": torch.zeros(rows, COLUMNS // 2, dtype=torch.uint8),
            "weight_scale": torch.zeros(rows, COLUMNS // 16).to(FP8),
            "weight_scale_2": torch.zeros(()),
        }.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        remember(self, process, lambda _: False)


class Rank(torch.nn.Module):
    """An engine rank that has its part of the rows of each layer."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.layers = torch.nn.ModuleList(Linear(ROWS // ENGINES) for _ in range(LAYERS))

    def load_weights(self, weights):
        for name, tensor in weights:
            parameter = self.get_parameter(name).data
            parameter.copy_(tensor.chunk(ENGINES)[self.rank] if tensor.dim() else tensor)


def started(rank, version):
    checkpoint = {}
    for name, tensor in weights(version).items():
        checkpoint[name] = tensor
        if tensor.dim():
            quantized, scales = nvfp4.quantized(tensor, weights(version)[f"{name}_scale_2"])
            checkpoint |= {name: quantized, f"{name}_scale": scales}
    model = Rank(rank)
    model.load_weights(checkpoint.items())
    for layer in model.layers:
        process(layer)
    return model


def train(trainer, transport, options, updates=3):
    sender = WeightSender.over(
        trainer.group, trainer.send, timeout_s=30, transport=transport, bucket_bytes=BUCKET_BYTES
    )
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for version in range(1, updates + 1):
        shards = {
            name: distribute_tensor(tensor, mesh, [Shard(0) if tensor.dim() else Replicate()])
            for name, tensor in weights(version).items()
        }
        report = sender.update(shards.items(), weight_version=str(version), **options)
        assert report.transport == transport
    sender.close()


def serve(rank, size, requests, _transport, _options):
    model = started(rank, 0)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    differing = []
    for version, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request))
        assert receiver._executor.transfer.landing.turns > 3
        for name, right in started(rank, version).named_parameters():
            found = model.get_parameter(name).reshape(-1)
            if not torch.equal(found.view(torch.uint8), right.reshape(-1).view(torch.uint8)):
                differing.append((version, name))
    return differing


@pytest.mark.parametrize("options", [{"verify": "full"}, sweep({"staged": True, "verify": "sample"})], ids=str)
@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_engine_ranks_hold_what_a_start_on_the_quantized_checkpoint_leaves(transport, options):
    _, differing = run_world(TRAINERS, ENGINES, train, serve, transport, options)
    assert differing == [[]] * ENGINES
