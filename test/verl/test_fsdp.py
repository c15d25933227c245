"""FSDP models as verl's engines hold them: stacked experts come out as the tensors that verl's own export yields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import TrainerState, describe
from sglang_reshard.trainer.publisher import ShardPublisher
from support.plans import assembled_states
from support.sweep import sweep
from support.trainer_rows import shown
from support.world import run_world

RANKS = 3


def small_model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
              "num_key_value_heads": 2, "intermediate_size": 24}  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    config = AutoConfig.for_model(kind, **common, **(experts if kind == "qwen3_moe" else {}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def sharded(model: Any, layers: Any, strategy: str, ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (ranks,))
    if strategy == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=get_fsdp_wrap_policy(model, is_lora=hasattr(model, "peft_config")),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        use_orig_params=strategy == "fsdp, original parameters",
    )


def export(trainer: Any, kind: str, strategy: str) -> tuple[Any, bool]:
    """This rank's state, and whether a second look finds nothing new."""
    from sglang_reshard.verl.fsdp import FsdpShards

    model = small_model(kind)
    model = sharded(model, model.model.layers, strategy, trainer.size)
    engine = SimpleNamespace(module=model, model_config=SimpleNamespace(hf_config=model.config))
    reading, ranks = FsdpShards(), tuple(range(trainer.size))
    state = describe(reading.tensors(engine), trainer_rank=trainer.rank, global_ranks=ranks)
    # To be read when this process, and the memory that it hands out by handle, has gone.
    numbers = [shard.numpy().copy() for shard in state.shards]
    publisher = ShardPublisher(Session.host(), trainer.rank, ranks)
    first, second = (publisher.publish(reading.tensors(engine)) for _ in range(2))
    return (state.layout, numbers), first is second


STRATEGIES = ["fsdp2", "fsdp", pytest.param("fsdp, original parameters", marks=pytest.mark.sweep)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [sweep("qwen3"), "qwen3_moe"])
def test_what_comes_out_is_what_verl_itself_exports(kind: str, strategy: str, record_property: Any) -> None:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    told, _ = run_world(RANKS, 0, export, print, kind, strategy)
    found = assembled_states([state_of(*state) for state, _ in told])
    expected = dict(unfuse_moe_params(small_model(kind).state_dict().items(), kind))
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(unchanged for _, unchanged in told)
    experts = ", stacked experts" if kind == "qwen3_moe" else ""
    record_property("trainer", shown(f"{strategy} as verl wraps it{experts}", "the module", "any", "read"))


def with_adapters(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model(kind), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return model


def export_merged(trainer: Any, kind: str, strategy: str) -> tuple[Any, bool]:
    """This rank's state with adapters merged, and whether they are out of the weights again afterwards."""
    from sglang_reshard.verl.fsdp import FsdpShards, merged

    model = with_adapters(kind)
    model = sharded(model, model.base_model.model.model.layers, strategy, trainer.size)
    engine = SimpleNamespace(module=model, model_config=SimpleNamespace(hf_config=model.config))
    before = [local(parameter).clone() for parameter in model.parameters()]
    with merged(engine):
        ranks = tuple(range(trainer.size))
        state = describe(FsdpShards().tensors(engine), trainer_rank=trainer.rank, global_ranks=ranks)
        numbers = [shard.numpy().copy() for shard in state.shards]
    restored = all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
    return (state.layout, numbers), restored


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def state_of(layout: Any, numbers: list[Any]) -> TrainerState:
    return TrainerState(layout, tuple(map(torch.from_numpy, numbers)), ())


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_adapters_are_merged_for_as_long_as_the_weights_are_read(strategy: str) -> None:
    told, _ = run_world(RANKS, 0, export_merged, print, "qwen3", strategy)
    found = assembled_states([state_of(*state) for state, _ in told])
    expected = with_adapters("qwen3").merge_and_unload().state_dict()
    plain = small_model("qwen3").state_dict()
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    assert any(not torch.equal(found[name], plain[name]) for name in found)
    assert all(restored for _, restored in told)
