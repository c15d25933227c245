"""DeepSpeed's ZeRO-3 hands over its partitions in place; ZeRO-1 and 2 what every rank has whole."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import describe
from support.deepspeed_env import FOLDER, import_deepspeed
from support.saved_versions import serve
from support.toy import checkpoint
from support.trainer_rows import shown
from support.world import run_world

needs_deepspeed = pytest.mark.skipif(not FOLDER.exists(), reason="DeepSpeed is not installed: make setup-deepspeed")
BF16 = torch.bfloat16
VERSIONS = 3
WAY = "named_parameters(), the module"
NAMES = {
    "zero3": "ZeRO-3",
    "persistent": "ZeRO-3, persistent small parameters",
    "hpz": "ZeRO-3, hpZ",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
}
KINDS = {
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "persistent": {"stage": 3, "stage3_param_persistence_threshold": 100},  # the norm and the small ones
    "hpz": {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
}


class Part(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self):  # ZeRO-3 gathers for a module's own forward
        return (self.weight.float() * 0.5).square().sum()


class Model(nn.Module):
    """Parameters by the toy checkpoint's names."""

    def __init__(self, dtype):
        super().__init__()
        for name, tensor in checkpoint(0, dtype).items():
            self.add_module(name.removesuffix(".weight"), Part(tensor))

    def forward(self):
        return sum(part() for part in self.children())


def engine_of(kind, dtype):
    deepspeed = import_deepspeed(dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {**KINDS[kind], "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "bf16": {"enabled": dtype is BF16},
    }
    engine, *_ = deepspeed.initialize(model=Model(dtype), config=config)
    return deepspeed, engine


def gathered(deepspeed, engine):
    """What DeepSpeed itself gathers."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def train(trainer, kind, transport, dtype, folder):
    deepspeed, engine = engine_of(kind, dtype)
    sender = trainer.sender(transport=transport, bucket_bytes=500, timeout_s=180)
    told = []
    for version in range(VERSIONS):
        torch.save(gathered(deepspeed, engine), f"{folder}/{version}.{trainer.rank}")
        given = engine.module if version % 2 else list(engine.module.named_parameters())
        report = sender.update(given, weight_version=f"{folder}/{version}.0", verify="full")
        least = sum(rank.least_bytes for rank in report.engine_ranks)
        told.append((sum(rank.received_bytes for rank in report.engine_ranks) / least, "plan" in report.seconds))
        engine.backward(engine())
        engine.step()
    changes = sender._publisher._changes
    return told, changes is not None


def check(ranks, engines, kind, transport, dtype, folder, record_property):
    told, served = run_world(ranks, engines, train, serve, kind, transport, dtype, str(folder))
    assert served == [[[]] * VERSIONS] * engines
    ratios, detects = zip(*told, strict=True)
    assert ratios == ([(1.0, True), (1.0, False), (1.0, False)],) * ranks
    assert all(detects)
    record_property("trainer", shown(f"DeepSpeed {NAMES[kind]}", WAY, transport, "run", 1.0))


@needs_deepspeed
@pytest.mark.parametrize(("kind", "transport", "dtype"), [("zero3", "ipc", BF16), ("persistent", "p2p", torch.float32)])
def test_an_engine_follows_the_optimizer(kind, transport, dtype, tmp_path, record_property):
    check(3, 2, kind, transport, dtype, tmp_path, record_property)


@needs_deepspeed
@pytest.mark.sweep
@pytest.mark.parametrize("transport", ["ipc", "p2p"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_follows_the_optimizer_by_any_way(kind, transport, tmp_path, record_property):
    check(4, 4, kind, transport, BF16, tmp_path, record_property)


def parameter(**piece):
    given = torch.empty(0)
    given.ds_tensor = torch.zeros(4)
    vars(given.ds_tensor).update({"status": SimpleNamespace(name="AVAILABLE"), "ds_numel": 4, **piece})
    return given


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        ({"status": SimpleNamespace(name="NOT_AVAILABLE")}, "is not in memory .offload_param to NVMe."),
        ({"ds_quant_scale": torch.ones(1)}, "is quantized by ZeRO-3"),
    ],
)
def test_pieces_elsewhere_and_quantized_ones_are_refused(piece, says, record_property):
    with pytest.raises(Unsupported, match=f"^trainer rank 0: w .*{says}"):
        describe([("w", parameter(**piece))], trainer_rank=0, global_ranks=(0,))
    kind = "quantized weights" if "ds_quant_scale" in piece else "offload_param to NVMe"
    record_property("trainer", shown(f"DeepSpeed ZeRO-3, {kind}", WAY, "any", "refused"))
