"""FSDP2 models as verl's engines hold them: stacked experts come out as the tensors that verl's own export yields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import describe
from sglang_reshard.trainer.publisher import ShardPublisher
from support.world import run_world
from test_shard_contract import assembled

RANKS = 3


def small_model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
              "num_key_value_heads": 2, "intermediate_size": 24}  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    config = AutoConfig.for_model(kind, **common, **(experts if kind == "qwen3_moe" else {}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def export(trainer: Any, kind: str) -> tuple[Any, bool]:
    """This rank's state, and whether a second look finds nothing new."""
    from sglang_reshard.verl.fsdp import Fsdp2

    model = small_model(kind)
    mesh = init_device_mesh("cpu", (trainer.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = SimpleNamespace(module=model, model_config=SimpleNamespace(hf_config=model.config))
    reading, ranks = Fsdp2(), tuple(range(trainer.size))
    state = describe(reading.tensors(engine), trainer_rank=trainer.rank, global_ranks=ranks)
    # To be read when this process, and the memory that it hands out by handle, has gone.
    numbers = [shard.numpy().copy() for shard in state.shards]
    publisher = ShardPublisher(Session.host(), trainer.rank, ranks)
    first, second = (publisher.publish(reading.tensors(engine), check_finite=False) for _ in range(2))
    return (state.layout, numbers), first is second


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_what_comes_out_is_what_verl_itself_exports(kind: str) -> None:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    told, _ = run_world(RANKS, 0, export, print, kind, deadline_s=120)
    states = [SimpleNamespace(layout=layout, shards=list(map(torch.from_numpy, n))) for (layout, n), _ in told]
    found = assembled(states)
    expected = dict(unfuse_moe_params(small_model(kind).state_dict().items(), kind))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(unchanged for _, unchanged in told)


def with_adapters(kind: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_model(kind), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return model


def export_merged(trainer: Any, kind: str) -> tuple[Any, bool]:
    """This rank's state with adapters merged, and whether they are out of the weights again afterwards."""
    from sglang_reshard.verl.fsdp import Fsdp2, merged

    model = with_adapters(kind)
    mesh = init_device_mesh("cpu", (trainer.size,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = SimpleNamespace(module=model, model_config=SimpleNamespace(hf_config=model.config))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with merged(engine):
        ranks = tuple(range(trainer.size))
        state = describe(Fsdp2().tensors(engine), trainer_rank=trainer.rank, global_ranks=ranks)
        numbers = [shard.numpy().copy() for shard in state.shards]
    restored = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
    return (state.layout, numbers), restored


def test_adapters_are_merged_for_as_long_as_the_weights_are_read() -> None:
    told, _ = run_world(RANKS, 0, export_merged, print, "qwen3", deadline_s=120)
    states = [SimpleNamespace(layout=layout, shards=list(map(torch.from_numpy, n))) for (layout, n), _ in told]
    found = assembled(states)
    expected = with_adapters("qwen3").merge_and_unload().state_dict()
    plain = small_model("qwen3").state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    assert any(not torch.equal(found[name], plain[name]) for name in found)
    assert all(restored for _, restored in told)
