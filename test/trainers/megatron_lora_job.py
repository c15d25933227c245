"""What the trainer ranks of test_megatron_lora.py do: a Megatron-Core model trains adapters that an engine serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sglang_reshard import VerlEngine
from sglang_reshard.sources import megatron_adapter_config, megatron_adapter_tensors
from sglang_reshard.testing import cpu_host
from support import megatron_lora
from support.log_probs import log_probs, served_log_probs
from support.megatron_models import Case, checkpoint, logits, megatron_models, parallel, reference

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def two_versions(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates of an adapter; what the engine says of the prompts after each, and what Megatron-Core says."""
    folder, case = Path(job["folder"]), Case(**job["case"])
    base = reference(case)
    if dist.get_rank() == 0:
        base.save_pretrained(folder / "model")
    dist.barrier()
    cpu_host.activate(job["tp_size"])
    engine = VerlEngine(
        device_mesh_cpu=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",)),
        timeout_s=180,
        model_path=str(folder / "model"),
        skip_tokenizer_init=True,
        log_level="warning",
        enable_lora=True,
        max_lora_rank=8,
        max_loras_per_batch=2,
        lora_target_modules=MODULES,
        lora_backend="torch_native",
        **cpu_host.engine_arguments(tp_size=job["tp_size"], dtype="float32"),
    )
    seen: dict[str, Any] = {
        "reports": [],
        "served": [],
        "expected": [],
        "base": served_log_probs(engine, PROMPTS, None),
    }
    with parallel(case):
        models = megatron_models(case, checkpoint(base))
        megatron_lora.adapt(models, dim=4, alpha=8)
        policy = engine.lora_adapter("policy", megatron_adapter_config(models))
        for version in (1, 2):
            megatron_lora.train(models, seed=10 * version + dist.get_rank())
            report = policy.update(megatron_adapter_tensors(models), partial=True, weight_version=str(version))
            seen["reports"].append(report.as_dict())
            seen["served"].append(served_log_probs(engine, PROMPTS, "policy"))
            found = [logits(case, models, torch.tensor([prompt])) for prompt in PROMPTS]
            said = [log_probs(one[0], prompt) for one, prompt in zip(found, PROMPTS, strict=True) if one is not None]
            seen["expected"].append(said)
    engine.shutdown()
    return seen
