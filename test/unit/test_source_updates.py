"""Whole updates of the source layouts where moving the bytes matters, over the real sender and receiver on gloo."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.left_behind import torch_segments
from support.toy import ToyRank, checkpoint
from support.world import run_world

EXPERTS, INNER, HIDDEN = 3, 4, 10


def values(version, dtype):
    """A version of the toy's checkpoint, with stacked experts [expert, inner, hidden] and [expert, hidden, inner]."""
    generator = torch.Generator().manual_seed(100 + version)
    up, down = (torch.randn(EXPERTS, *s, generator=generator) for s in ((INNER, HIDDEN), (HIDDEN, INNER)))
    return {**checkpoint(version, dtype), "experts_up": up.to(dtype), "experts_down": down.to(dtype)}


class Engine(ToyRank):
    """The toy, and stacked experts of which every engine rank holds some of the inner dimension."""

    def __init__(self, rank, size, dtype):
        super().__init__(rank, size, dtype)
        self.part = INNER // size
        for name, shape in (("up", (EXPERTS, self.part, HIDDEN)), ("down", (EXPERTS, HIDDEN, self.part))):
            garbage = nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)
            self.register_parameter(f"experts_{name}", garbage)

    def _load_experts_up(self, loaded):
        self.experts_up.data.copy_(loaded.narrow(1, self.rank * self.part, self.part))

    def _load_experts_down(self, loaded):
        self.experts_down.data.copy_(loaded.narrow(2, self.rank * self.part, self.part))


class Model(nn.Module):
    """Parameters by the checkpoint's names."""

    def __init__(self, dtype):
        super().__init__()
        for name, tensor in values(0, dtype).items():
            path, _, leaf = name.rpartition(".")
            owner = self
            if path:
                owner = nn.Module()
                self.add_module(path, owner)
            owner.register_parameter(leaf, nn.Parameter(tensor))

    def forward(self):
        return sum(parameter.float().sum() for parameter in self.parameters())


# -- ways to hold a training state. Each returns named tensors and is written to through their local tensors


def fully_sharded(ranks, dtype, **options):
    model = Model(dtype)
    fully_shard(model.q, **options)
    fully_shard(model, **options)
    return model


def fsdp(ranks, dtype):
    return dict(fully_sharded(ranks, dtype).named_parameters())


def offloaded(ranks, dtype):
    return dict(fully_sharded(ranks, dtype, offload_policy=CPUOffloadPolicy(pin_memory=False)).named_parameters())


def distributed(ranks, dtype, placed=lambda name, tensor: Shard(0)):
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: distribute_tensor(tensor, mesh, [placed(name, tensor)], src_data_rank=None)
        for name, tensor in values(0, dtype).items()
    }


def last_dimension(ranks, dtype):
    """Shard(2) of the stacked experts, Shard(1) of matrices; uneven, and empty on most ranks for some."""
    return distributed(ranks, dtype, lambda name, tensor: Shard(tensor.dim() - 1))


def middle_dimension(ranks, dtype):
    return distributed(ranks, dtype, lambda name, tensor: Shard(1 if tensor.dim() == 3 else 0))


def relocated(state, move):
    """The same DTensors, their local tensors where `move` puts them."""
    return {
        name: DTensor.from_local(
            move(t.to_local()), t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
        )
        for name, t in state.items()
    }


def flat_buffer(ranks, dtype):
    """Megatron and DDP style: one storage for all parameters, none of them at its beginning."""
    state = last_dimension(ranks, dtype)
    buffer = torch.zeros(17 + sum(t.to_local().numel() + 3 for t in state.values()), dtype=dtype)
    position = 17

    def move(local):
        nonlocal position
        view = buffer[position : position + local.numel()].view(local.shape)
        position += local.numel() + 3
        return view

    moved = relocated(state, move)
    assert len({t.to_local().untyped_storage().data_ptr() for t in moved.values() if t.to_local().numel()}) == 1
    return moved


def transposed(ranks, dtype):
    def move(local):
        return torch.zeros(local.shape[::-1], dtype=dtype).permute(*reversed(range(local.dim())))

    return relocated(distributed(ranks, dtype), move)


def every_other(ranks, dtype):
    def move(local):
        wide = torch.full((*local.shape[:-1], 2 * local.shape[-1] + 1), float("nan"), dtype=dtype)
        return wide[..., 1::2]

    return relocated(distributed(ranks, dtype), move)


def mixed(ranks, dtype):
    """Plain tensors among DTensors, as frozen or ignored parameters are."""
    state = last_dimension(ranks, dtype)
    return {n: t if i % 2 else values(0, dtype)[n] for i, (n, t) in enumerate(state.items())}


def write(state, version, dtype):
    """In place, as an optimizer writes."""
    for name, whole in values(version, dtype).items():
        tensor = state[name].detach()
        if isinstance(tensor, DTensor):
            new = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(new.to_local())
        else:
            tensor.copy_(whole)


def train(trainer, live_dtype, ways):
    for way, dtype in ways:
        sender = trainer.sender(bucket_bytes=500)
        state = globals()[way](trainer.size, dtype)
        for version in (1, 2):
            write(state, version, dtype)
            sender.update(state.items(), weight_version=f"{way}/{str(dtype).removeprefix('torch.')}/{version}")
        sender.close()


def serve(rank, size, requests, live_dtype, ways=()):
    """Which parameters were not what stock loading of the checkpoint makes them, by update."""
    model = Engine(rank, size, live_dtype)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    differing, updates = [], 0
    for request in requests:
        requests.answer(receiver.update(request))
        way, dtype, version = request.weight_version.split("/")
        stock = Engine(rank, size, live_dtype)
        stock.load_weights(values(int(version), getattr(torch, dtype)).items())
        for name, parameter in stock.named_parameters():
            if not torch.equal(getattr(model, name), parameter):
                differing.append((way, dtype, version, name))
        updates += 1
    return differing, updates


def check(trainers, engines, live_dtype, ways):
    _, served = run_world(trainers, engines, train, serve, live_dtype, ways)
    assert served == [([], 2 * len(ways))] * engines


BF16, FP32 = torch.bfloat16, torch.float32
WAYS = [fsdp, last_dimension, middle_dimension, offloaded, flat_buffer, transposed, every_other, mixed]


@pytest.mark.parametrize(("trainers", "engines"), [(5, 2), (7, 2)])
def test_uneven_fsdp2_with_empty_shards_from_float32_masters(trainers, engines):
    check(trainers, engines, BF16, [("fsdp", FP32)])


def test_every_way_to_hold_a_shard_with_a_cast_on_the_way():
    check(3, 2, BF16, [(way.__name__, FP32) for way in WAYS])


def test_every_way_to_hold_a_shard_in_its_own_dtype_and_from_bfloat16():
    before = torch_segments()
    check(4, 2, FP32, [(way.__name__, dtype) for way, dtype in zip(WAYS, itertools.cycle([FP32, BF16]), strict=False)])
    assert torch_segments() <= before


# -- a root that is unsharded: evaluated, then stepped, then sent
