"""Models of a few hundred kilobytes, one for each kind of layout, as Hugging Face folders.

The sizes are awkward on purpose: vocabularies that no tensor parallel size divides, fewer key-value
heads than ranks, several experts a rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.layout import TensorSpec

_BODY = {"hidden_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 512}
_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
_DENSE = _BODY | _ATTENTION | {"vocab_size": 510, "intermediate_size": 512}


@dataclass(frozen=True)
class TinyModel:
    """The transformers config class, the architecture, and the config."""

    config_class: str
    architecture: str
    config: dict[str, Any]


TINY_MODELS = {
    "qwen3": TinyModel("Qwen3Config", "Qwen3ForCausalLM", _DENSE | {"tie_word_embeddings": False}),
    "qwen3_tied": TinyModel("Qwen3Config", "Qwen3ForCausalLM", _DENSE | {"tie_word_embeddings": True}),
    "llama": TinyModel(
        "LlamaConfig",
        "LlamaForCausalLM",
        _DENSE | {"vocab_size": 1001, "intermediate_size": 384, "tie_word_embeddings": False},
    ),
    "qwen3_moe": TinyModel(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _DENSE
        | {
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _BODY
        | {
            "vocab_size": 510,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}


def write_config(name: str, folder: Path) -> str:
    """Write config.json and return the folder as SGLang wants it."""
    import transformers

    tiny = TINY_MODELS[name]
    config = getattr(transformers, tiny.config_class)(**tiny.config).to_dict()
    # transformers drops keys that its class does not know; SGLang reads them.
    config |= {k: v for k, v in tiny.config.items() if k not in config}
    config |= {"architectures": [tiny.architecture], "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder)


def manifest(name: str, folder: str) -> list[TensorSpec]:
    """The tensors of the model's checkpoint, under the names that they have on disk."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, TINY_MODELS[name].architecture)(config)
    specs: list[TensorSpec] = []
    for key, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # transformers stacks the experts in memory; on disk each has tensors of its own.
        prefix = key.rsplit(".", 1)[0]
        if key.endswith("experts.gate_up_proj"):
            half = (shape[1] // 2, shape[2])
            for expert in range(shape[0]):
                specs += [
                    TensorSpec(f"{prefix}.{expert}.{part}.weight", half, "bfloat16")
                    for part in ("gate_proj", "up_proj")
                ]
        elif key.endswith("experts.down_proj"):
            specs += [
                TensorSpec(f"{prefix}.{expert}.down_proj.weight", shape[1:], "bfloat16") for expert in range(shape[0])
            ]
        else:
            dtype = "float32" if "e_score_correction_bias" in key else "bfloat16"
            specs.append(TensorSpec(key, shape, dtype))
    return specs


def random_weights(specs: list[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint like `specs`."""
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in specs}


def write_checkpoint(name: str, folder: Path, seed: int) -> str:
    """A whole model folder with random weights; returns it as SGLang wants it."""
    from safetensors.torch import save_file

    path = write_config(name, folder)
    save_file(random_weights(manifest(name, path), seed), folder / "model.safetensors", {"format": "pt"})
    return path
