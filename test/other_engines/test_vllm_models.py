"""vLLM's own model classes: the program of a trace writes what their `load_weights` writes, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.vllm_env import needs_vllm, run_job

JOB = Path(__file__).with_name("vllm_models_job.py")
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 509,  # padded, to 512
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "Qwen3": (transformers.Qwen3Config, {}),
    "Llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "Qwen3-MoE": (transformers.Qwen3MoeConfig, EXPERTS),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """Name -> the folder of a checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, (name, (kind, changes)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | changes)).to(torch.bfloat16)
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in MODELS}


@needs_vllm
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_traced_loader_writes_what_load_weights_writes(ranks, checkpoints, tmp_path):
    for of_rank in run_job(JOB, ranks, {"models": checkpoints}, tmp_path):
        assert of_rank.keys() == MODELS.keys()
        for name, found in of_rank.items():
            assert found["differ"] == [], name
            assert found["zero"] == [], name  # or nothing was compared
            assert found["copies"] > 10
            assert found["tensors"] > 10
            assert found["kept"] == []
