"""LoRA adapters that a multimodal engine would not serve whole are refused before it receives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examination import built
from rank_jobs import run_jobs
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches import lora_trial
from sglang_reshard.protocol.messages import LoraAdapter
from support.checkpoints import write_checkpoint
from support.sglang_state import published_arguments

RANK = 4
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": MODULES})
TP = {"tp_size": 2, "tp_rank": 1}
LORA = {"lora_backend": "torch_native", "max_lora_rank": 8, "max_loras_per_batch": 2}


def lora_manager(folder: Path) -> Any:
    """SGLang's own, which gives the model of an engine rank its slots."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager

    model = built(str(folder), False, {"enable_lora": True, "lora_target_modules": MODULES, **LORA, **TP})
    return LoRAManager(
        base_model=model,
        base_hf_config=transformers.AutoConfig.from_pretrained(folder),
        load_config=LoadConfig(load_format="dummy"),
        dtype=torch.bfloat16,
        server_args=published_arguments(),
        target_modules=MODULES,
        **LORA,
        **TP,
    )


def specs_of(name: str, layer: torch.nn.Linear) -> list[TensorSpec]:
    sizes = {"A": (RANK, layer.in_features), "B": (layer.out_features, RANK)}
    return [TensorSpec(f"base_model.model.{name}.lora_{matrix}.weight", s, "bfloat16") for matrix, s in sizes.items()]


def tried(folder: Path) -> dict[str, str]:
    write_checkpoint("Qwen2_5_VLForConditionalGeneration", folder)
    manager = lora_manager(folder)
    with torch.device("meta"):
        trainer = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(folder))
    linear = {name: module for name, module in trainer.named_modules() if isinstance(module, torch.nn.Linear)}
    text = {n: m for n, m in linear.items() if ".language_model." in n and n.endswith(tuple(MODULES))}
    output = next(name for name in text if name.endswith("o_proj"))
    adapters = {
        "text": text,
        "tower": text | {name: module for name, module in linear.items() if name.endswith("blocks.0.attn.qkv")},
        "another model's": text | {output.replace("language_model", "other"): text[output]},
        "of no slot": text | {output.replace("o_proj", "b_proj"): text[output]},
        "of no layer": text | {output.replace("layers.0", "layers.99"): text[output]},
    }
    return {
        name: lora_trial.refusal(
            manager, LoraAdapter(name, CONFIG, "id"), [spec for module in of.items() for spec in specs_of(*module)]
        )
        for name, of in adapters.items()
    }


pytestmark = [pytest.mark.engine]


def test_an_adapter_is_served_whole_or_refused(tmp_path: Path) -> None:
    ((seen,),) = run_jobs(tried, [()], tmp_path / "checkpoint", gpu=False)
    assert seen["text"] == ""
    assert "visual.blocks.0.attn.qkv.lora_A.weight: SGLang serves no adapter of this module" in seen["tower"]
    assert "other.layers.0.self_attn.o_proj.lora_A.weight: the engine adapts no such module" in seen["another model's"]
    assert "ValueError: Cannot find target module name for" in seen["of no slot"]
    assert "SGLang cannot load the LoRA adapter of no layer: IndexError" in seen["of no layer"]
