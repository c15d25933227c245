"""A Qwen3 of two layers that stock SGLang serves on a CPU host; its vocabulary is prime."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config


def tiny_qwen3(**changes: Any) -> Qwen3Config:
    sizes = {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 192,
        "vocab_size": 509,
        "max_position_embeddings": 4096,
        "num_hidden_layers": 2,
        "architectures": ["Qwen3ForCausalLM"],
    }
    return Qwen3Config(**sizes | changes)
