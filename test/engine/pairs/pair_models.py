"""Models of a few thousand elements, so that an update of them can go in buckets of a few bytes.

One of each kind that travels differently: fused and padded tensors, a tied head, experts, and latent attention,
whose weights are followed by what `post_load_weights` computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.layout.regions import TensorSpec

_BODY = {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 64, "vocab_size": 19}
_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_DENSE = _BODY | _ATTENTION | {"intermediate_size": 24}

# transformers' class, and what its config is given.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3ForCausalLM", _DENSE | {"tie_word_embeddings": False}),
    "tied": ("LlamaForCausalLM", _DENSE | {"tie_word_embeddings": True}),
    "experts": ("Qwen3MoeForCausalLM", _DENSE | _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1}),
    "latent": (
        "DeepseekV3ForCausalLM",
        _BODY
        | _EXPERTS
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 24,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            # In host memory SGLang has this rotary embedding only.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
WITH_EXPERTS = ("experts", "latent")
# transformers' classes have these built in; SGLang reads them.
_FOR_SGLANG = {"latent": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}}
_FLOAT32 = "e_score_correction_bias"


def write(name: str, folder: Path) -> list[TensorSpec]:
    """Write a model's config for SGLang; the tensors that its checkpoint has, in bfloat16."""
    import transformers
    from safetensors import safe_open

    architecture, keys = MODELS[name]
    writer = getattr(transformers, architecture)
    transformers.logging.disable_progress_bar()
    model = writer._from_config(writer.config_class(**keys), dtype=torch.bfloat16)
    model.save_pretrained(folder)  # it stacks experts in memory, and takes them apart when it saves
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | _FOR_SGLANG.get(name, {})))
    with safe_open(folder / "model.safetensors", framework="pt") as saved:
        return [
            TensorSpec(n, tuple(saved.get_slice(n).get_shape()), "float32" if n.endswith(_FLOAT32) else "bfloat16")
            for n in saved.keys()  # noqa: SIM118 (it is no dict)
        ]


def weights(specs: list[TensorSpec], version: int, dtype: str) -> dict[str, torch.Tensor]:
    """A version of a checkpoint, in `dtype`; what is float32 in the real one stays so."""
    generator = torch.Generator().manual_seed(version)
    random = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
    return {s.name: random[s.name].to(getattr(torch, s.dtype if s.dtype == "float32" else dtype)) for s in specs}
