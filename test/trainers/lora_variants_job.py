"""What the trainer rank of test_lora_variants.py does: it serves adapters that PEFT trains with other options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, KasaConfig
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3ForCausalLM

from sglang_reshard import VerlEngine
from sglang_reshard.errors import ReshardError
from sglang_reshard.sources import adapter_config, adapter_tensors, base_tensors
from sglang_reshard.testing import cpu_host
from support.log_probs import log_probs, served_log_probs
from support.tiny_qwen3 import tiny_qwen3

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROWS = {"target_modules_bd_b": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]}
SERVED: dict[str, dict[str, Any]] = {
    "all modules": {},
    "one layer": {"layers_to_transform": [1]},
    "some modules": {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding, in the slot of the one before": {"target_modules": ["embed_tokens"]},
    "all of one kind": {"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.down_proj"]},
    "MiCA, with dropout": {"init_lora_weights": "mica", "lora_dropout": 0.3},
    "rsLoRA": {"use_rslora": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "KaSA": {"kasa_config": KasaConfig()},
    "BD-LoRA": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["o_proj", "down_proj"], nblocks=2, **ROWS)},
    "keys alone": {"target_modules": ["k_proj"]},
    "queries alone": {"target_modules": ["q_proj"]},
    "up alone": {"target_modules": ["up_proj"]},
}


class Job:
    """An engine with two slots for adapters besides the base model's, and the checkpoint that it started on."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "model"
        torch.manual_seed(0)
        Qwen3ForCausalLM(tiny_qwen3(tie_word_embeddings=False)).float().save_pretrained(self.checkpoint)
        cpu_host.activate(1)
        self.engine = VerlEngine(
            device_mesh_cpu=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)),
            timeout_s=180,
            model_path=str(self.checkpoint),
            skip_tokenizer_init=True,
            log_level="warning",
            enable_lora=True,
            max_lora_rank=8,
            max_loras_per_batch=2,
            lora_target_modules=["all"],
            lora_backend="torch_native",
            **cpu_host.engine_arguments(tp_size=1, dtype="float32"),
        )
        self.adapters = 0

    def base(self) -> Qwen3ForCausalLM:
        return Qwen3ForCausalLM.from_pretrained(self.checkpoint).float()

    def model(self, **options: Any) -> PeftModel:
        """A model whose adapter has been trained a little."""
        torch.manual_seed(1)
        options = {"target_modules": MODULES, "init_lora_weights": False} | options
        model = get_peft_model(self.base(), LoraConfig(r=4, lora_alpha=8, **options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter += 0.05 * torch.randn_like(parameter)
        return model

    def difference(self, model: PeftModel, adapter: str | None) -> float:
        """The largest between log-probabilities of the engine and PEFT's own."""
        with torch.no_grad():
            expected = log_probs(model(torch.tensor([PROMPT])).logits[0], PROMPT)
        (served,) = served_log_probs(self.engine, [PROMPT], adapter)
        return max(abs(a - b) for a, b in zip(served, expected, strict=True))

    def serve(self, model: PeftModel, **options: Any) -> float:
        self.adapters += 1
        name = f"adapter {self.adapters}"
        self.engine.lora_adapter(name, adapter_config(model), **options).update(adapter_tensors(model))
        return self.difference(model, name)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def variants(job: dict[str, Any]) -> dict[str, Any]:
    """Differences of log-probabilities, or what was refused."""
    run = Job(Path(job["folder"]))
    update, model = run.engine.update_weights_from_tensor, run.model()
    seen: dict[str, Any] = {"whole": outcome(lambda: update(model))}
    model.merge_adapter()
    update(base_tensors(model), weight_version="merged")
    seen["merged"] = run.difference(model, None)
    model.unmerge_adapter()
    seen["over merged"] = outcome(lambda: run.serve(model))
    update(base_tensors(model))
    seen["served"] = {name: outcome(lambda o=options: run.serve(run.model(**o))) for name, options in SERVED.items()}
    seen["refused"] = {name: outcome(lambda o=options: run.serve(run.model(**o))) for name, options in REFUSED.items()}
    model.merge_adapter()
    seen["merged over"] = outcome(lambda: update(base_tensors(model)))
    seen["said so"] = outcome(lambda: update(dict(base_tensors(model)), merged=["default"]))
    model.unmerge_adapter()
    seen["after"] = run.serve(model)
    for init in ("pissa", "olora"):
        changed = run.model(init_lora_weights=init)
        seen[init] = outcome(lambda m=changed: run.serve(m))
        seen[f"{init}, with its base"] = run.serve(changed, base=base_tensors(changed))
    run.engine.shutdown()
    return seen
