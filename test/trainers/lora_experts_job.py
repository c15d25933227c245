"""What the trainer ranks of test_lora_experts.py do: FSDP2 trains adapters of experts, and an engine loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from sglang_reshard import VerlEngine
from sglang_reshard.sources import adapter_config, adapter_tensors
from sglang_reshard.testing import cpu_host
from support.megatron_models import Case, reference
from tools.oracle.digests import read_live_digests, write_json

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"hidden": 128, "heads": 8, "groups": 4, "head": 32, "mlp": 64, "vocabulary": 509, "positions": 4096}
LOADER = "trainers.lora_experts_job.write_added"
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
    return get_peft_model(reference(Case("qwen3_moe", **SIZES)), config)


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
        reference(Case("qwen3_moe", **SIZES)).save_pretrained(folder / "model")
    dist.barrier()
    for module in model.modules():
        if isinstance(module, Qwen3MoeDecoderLayer):
            fully_shard(module)
    fully_shard(model)
    assert isinstance(whole.get_base_model(), Qwen3MoeForCausalLM)
    cpu_host.activate(size)
    engine = VerlEngine(
        device_mesh_cpu=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
        timeout_s=180,
        model_path=str(folder / "model"),
        skip_tokenizer_init=True,
        custom_weight_loader=[LOADER],
        log_level="warning",
        skip_server_warmup=True,
        enable_lora=True,
        max_lora_rank=LARGEST,
        max_loras_per_batch=2,
        lora_target_modules=[*MODULES, "gate_up_proj", "down_proj"],
        lora_backend="torch_native",
        **cpu_host.engine_arguments(tp_size=size, dtype="float32"),
    )
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
            seen["added"].append(read_live_digests(engine.engine, folder / "slots", LOADER))
        dist.barrier()
    policy.update([row for row in adapter_tensors(model) if ".experts." not in row[0]])
    if dist.get_rank() == 0:
        seen["without"] = read_live_digests(engine.engine, folder / "slots", LOADER)
    dist.barrier()
    engine.shutdown()
    return seen
