"""LoRA adapters of stacked experts, which PEFT trains over FSDP2 with `target_parameters`, in a real engine's slots.

What a slot adds to each expert's weights is compared with what PEFT adds to them when it merges. SGLang computes with
adapters of experts in Triton only, so the engine generates nothing here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from sglang_reshard.selftest.digests import write_json
from sglang_reshard.sources import adapter_config, adapter_tensors
from support.live_engines import LORA, live_digests, live_engine
from support.sglangs import chosen
from support.trainer_rows import shown
from support.trainers import run_trainers

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"hidden": 128, "heads": 8, "groups": 4, "head": 32, "mlp": 64, "vocabulary": 509, "positions": 4096}
LOADER = "test_lora_experts.write_added"
RANK, LARGEST, SLOT = 3, 8, 1  # the first slot is the base model's


def write_added(model: nn.Module, named_tensors: Any) -> None:
    """A custom weight loader: every rank writes what the slot adds to its part of each expert's weights.

    The slot has the gate's and the up projection's lora_A one after the other, each padded to the largest rank, and
    lora_B with SGLang's scaling.
    """
    added = []
    for module in model.modules():
        if type(module).__name__ == "FusedMoEWithLoRA":
            a, b = module.gate_up_lora_a_weights[SLOT], module.gate_up_lora_b_weights[SLOT]
            (gate_b, up_b), (gate_a, up_a) = b.chunk(2, 1), (a[:, :LARGEST], a[:, LARGEST:])
            down = module.down_lora_b_weights[SLOT] @ module.down_lora_a_weights[SLOT]
            added.append([t.tolist() for t in (gate_b @ gate_a, up_b @ up_a, down)])
    write_json(added, named_tensors)


def base_model() -> Qwen3MoeForCausalLM:
    from support.megatron_models import Case, reference  # Megatron-Core takes long to import

    return reference(Case("qwen3_moe", **SIZES))


def peft_model() -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(
        r=RANK,
        lora_alpha=6,
        use_rslora=True,
        target_modules=MODULES,
        target_parameters=PARAMETERS,
        init_lora_weights=False,
    )
    return get_peft_model(base_model(), config)


def expected(model: PeftModel, rank: int, size: int) -> list[list[Any]]:
    """What PEFT adds to the experts' weights, cut as engine rank `rank` of `size` has them, by layers."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "parameter_name"):
            layer = found.setdefault(name.replace(".base_layer", ""), {})
            layer[module.parameter_name] = module.get_delta_weight("default")
    return [
        [
            *(half.chunk(size, 1)[rank].tolist() for half in layer["gate_up_proj"].chunk(2, 1)),
            layer["down_proj"].chunk(size, 2)[rank].tolist(),
        ]
        for layer in found.values()
    ]


def two_versions(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates of an adapter, and one without its experts; what its slot adds after each, and what PEFT does."""
    folder, size = Path(job["folder"]), job["tp_size"]
    whole, model = peft_model(), peft_model()
    if dist.get_rank() == 0:
        base_model().save_pretrained(folder / "model")
    dist.barrier()
    for module in model.modules():
        if isinstance(module, Qwen3MoeDecoderLayer):
            fully_shard(module)
    fully_shard(model)
    assert isinstance(whole.get_base_model(), Qwen3MoeForCausalLM)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    modules = [*MODULES, "gate_up_proj", "down_proj"]
    options = {"skip_tokenizer_init": True, "skip_server_warmup": True, "lora_target_modules": modules}
    sizes = {"tp_size": size, "dtype": "float32"}
    engine = live_engine(mesh, folder / "model", loaders=[LOADER], **LORA, **options, **sizes)
    seen: dict[str, Any] = {"reports": [], "added": [], "expected": []}
    policy = engine.lora_adapter("policy", adapter_config(whole))
    for version in ("1", "2"):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(-1.5)
        seen["reports"].append(policy.update(adapter_tensors(model), weight_version=version).as_dict())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            whole.load_state_dict(state)
            seen["expected"].append([expected(whole, rank, size) for rank in range(size)])
            seen["added"].append(live_digests(engine, folder / "slots", LOADER))
        dist.barrier()
    policy.update([row for row in adapter_tensors(model) if ".experts." not in row[0]])
    seen["without"] = live_digests(engine, folder / "slots", LOADER)
    dist.barrier()
    engine.shutdown()
    return seen


pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("forks")]


@pytest.mark.parametrize("sglang", ["pinned", pytest.param("newest", marks=pytest.mark.sweep)])
def test_slots_hold_the_experts_adapters(sglang: str, tmp_path: Path, record_property: Any) -> None:
    with chosen(sglang):
        seen, _ = run_trainers(2, two_versions, tmp_path, tp_size=2)
    for added, expected in zip(seen["added"], seen["expected"], strict=True):
        assert len(added) == len(expected) == 2
        for of_rank, wanted in zip(added, expected, strict=True):
            assert len(of_rank) == len(wanted) == 2
            for layer, of_peft in zip(of_rank, wanted, strict=True):
                for one, other in zip(layer, of_peft, strict=True):
                    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-5)
    for of_rank in seen["without"]:
        assert not any(torch.tensor(one).any() for layer in of_rank for one in layer)
    first, second = seen["expected"]
    assert first != second
    for report in seen["reports"]:
        for rank in report["engine_ranks"]:
            assert rank["received_bytes"] == rank["least_bytes"] > 0
    prepared, ready = (report["seconds"] for report in seen["reports"])
    assert "plan" in prepared
    assert "plan" not in ready
    record_property("trainer", shown("FSDP2, PEFT, adapters of experts", "adapter_tensors", "auto", "run", 1.0))
