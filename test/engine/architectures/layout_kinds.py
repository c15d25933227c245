"""What kinds of layout a checkpoint has."""

from __future__ import annotations

import re
from typing import Any

import torch

from sglang_reshard.trace.program import Program


def layout_kinds(config: dict[str, Any], weights: dict[str, torch.Tensor], program: Program) -> set[str]:
    """The kinds by name, by what its config, its tensors and its program say."""
    names = list(weights)

    def named(pattern: str) -> bool:
        return any(re.search(pattern, n) for n in names)

    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    found = {
        "biases of linear layers": any(
            n.endswith(".bias") and weights.get(f"{n[:-4]}weight", weights[n]).dim() == 2 for n in names
        ),
        "tied embeddings": bool(config.get("tie_word_embeddings")),
        "grouped heads": bool(heads and groups and groups < heads),
        "latent attention": config.get("kv_lora_rank") is not None,
        "experts": named(r"experts\."),
        "shared experts": named(r"shared_(expert|mlp)"),
        "experts stacked on disk": any("experts" in n and t.dim() == 3 for n, t in weights.items()),
        "QKV fused on disk": named(r"(qkv|c_attn|query_key_value)[\w.]*weight"),
        "gate and up fused on disk": named(r"mlp\.gate_up_proj\.weight"),
        "values computed while loading": any(s.description.startswith("from ") for s in program.steps),
        "work after loading": any(s.description == "post_load_weights" for s in program.steps),
        "state space or linear attention": named(r"A_log"),
        "convolutions": named(r"\bconv"),
        "attention sinks": named(r"sinks"),
        "sliding window": bool(config.get("sliding_window")),
        "block-fp8": any(t.dtype == torch.float8_e4m3fn for t in weights.values()),
    }
    return {name for name, true in found.items() if true}
