"""Models by their configuration alone: the trainer makes random weights, and the engine starts on dummy ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.cli.layouts import Source, Target
from sglang_reshard.errors import Unsupported
from sglang_reshard.selftest import tiny_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TINY, TINY_MOE = "tiny", "tiny-moe"
_QWEN3 = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "head_dim": 128}
# Of published models; Qwen3-30B-A3B has 48 layers, of which three are enough to have every kind of tensor.
_PRESETS: Mapping[str, dict[str, Any]] = {
    "qwen3-1.7b": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_hidden_layers=28, hidden_size=2048,
                       intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8, vocab_size=151936,
                       tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_hidden_layers=36, hidden_size=4096,
                     intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, vocab_size=151936,
                     tie_word_embeddings=False, **_QWEN3),
    "qwen3-moe": dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=3,
                      hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
                      num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, vocab_size=32768,
                      norm_topk_prob=True, tie_word_embeddings=False, **_QWEN3),
}  # fmt: skip
NAMES = (TINY, TINY_MOE, *_PRESETS)


def check(model: str) -> None:
    """Raises Unsupported for a name that is no preset, no config.json and no folder with one."""
    if model and model not in NAMES and not _file(model).is_file():
        raise Unsupported(f"--model {model}: no such file; pass a config.json, its folder, or {', '.join(NAMES)}")


def _file(model: str) -> Path:
    return Path(model) / "config.json" if Path(model).is_dir() else Path(model)


def save(model: str, folder: Path, source: Source, target: Target) -> None:
    """Writes the files of an engine on dummy weights: the configuration.

    model  one of `NAMES`, a config.json or a folder with one
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model == TINY:
        tiny_model.config(source.tp, target.tp).save_pretrained(folder)
    elif model == TINY_MOE:
        _tiny_moe(target).save_pretrained(folder)
    elif model in _PRESETS:
        (folder / "config.json").write_text(
            json.dumps({"torch_dtype": "bfloat16", "eos_token_id": 0, **_PRESETS[model]})
        )
    else:
        (folder / "config.json").write_bytes(_file(model).read_bytes())


def trainer_dtype(model: str) -> torch.dtype:
    """Returns the dtype of the trainer's weights."""
    return torch.float32 if model in (TINY, TINY_MOE) else torch.bfloat16


def _tiny_moe(target: Target) -> PretrainedConfig:
    from transformers import Qwen3MoeConfig

    heads = max(8, target.tp)
    return Qwen3MoeConfig(  # type: ignore[call-arg]
        architectures=["Qwen3MoeForCausalLM"],
        dtype="float32",
        vocab_size=tiny_model.VOCABULARY,
        hidden_size=256,
        # So wide that SGLang pads no engine rank's part of an expert on a CPU.
        moe_intermediate_size=32 * max(4, target.tp),
        num_experts=max(16, target.ep),
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=tiny_model.HEAD_DIM,
        max_position_embeddings=tiny_model.MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
    )


def config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)
