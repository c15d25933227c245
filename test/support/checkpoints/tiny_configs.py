"""Any transformers config made tiny, by rules on its keys.

The sizes are awkward on purpose: a prime vocabulary that no tensor parallel size divides, fewer
key-value heads than four ranks, several experts a rank, layers of every kind that a model has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.checkpoints.published import merged

VOCABULARY, LAYERS, KV_HEADS, EXPERTS = 509, 4, 2, 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """unit, wide and narrow are widths in elements: of a head, of a dense layer and of an expert."""

    unit: int
    heads: int
    wide: int
    narrow: int


TINY = Sizes(unit=16, heads=8, wide=192, narrow=64)
# For two ranks with blocks of 128, which each rank's part has to consist of.
IN_BLOCKS = Sizes(unit=128, heads=4, wide=512, narrow=256)


def _rules(sizes: Sizes) -> Iterator[tuple[str, int]]:
    """What a key is called, and its value."""
    unit, heads = sizes.unit, sizes.heads
    yield r"hidden_size|n_embd|d_model|word_embed_proj_dim|backbone_hidden_size", heads * unit
    yield r"intermediate_size|intermediate_size_mlp|ffn_dim|ffn_hidden_size|n_inner", sizes.wide
    yield r"(moe|shared|shared_expert|moe_shared_expert)_intermediate_size|expert_ffn_hidden_size", sizes.narrow
    yield r"head_dim|qk_rope_head_dim|linear_(key|value)_head_dim|mamba_d_state|ssm_state_size|laurel_rank", unit
    yield r"qk_nope_head_dim|v_head_dim|index_head_dim|global_head_dim|hidden_size_per_layer_input", 2 * unit
    yield r"mamba_head_dim|mamba_d_head", 2 * unit
    yield r"q_lora_rank|qk_head_dim", 3 * unit
    yield r"kv_lora_rank|o_lora_rank", 4 * unit
    yield r"mamba_d_ssm", 2 * heads * unit
    yield r"num_attention_heads(_per_layer)?|n_heads?|index_n_heads|linear_num_value_heads", heads
    yield r"mamba_n_heads|mamba_num_heads|n_groups|mamba_n_groups", heads
    yield r"linear_num_key_heads|o_groups", heads // 2
    yield r"num_key_value_heads|kv_n_heads", KV_HEADS
    yield r"vocab_size|vocab_size_per_layer_input", VOCABULARY
    yield r"num_hidden_layers|n_layers?|num_layers", LAYERS
    yield r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", EXPERTS
    yield r"num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts|n_group|zero_expert_num", 2
    yield r"topk_group|first_k_dense_replace|num_kv_shared_layers", 1
    yield r"max_position_embeddings|n_positions|max_seq_len", 512
    yield r"original_max_position_embeddings", 128
    yield r"sliding_window|attention_chunk_size", 64
    yield r"rotary_dim", unit // 2
    yield r"index_topk", 16


_ROPE = {"factor": 4.0, "original_max_position_embeddings": 128}
_EXPERT_COUNT = re.compile(r"num_experts|num_local_experts|n_routed_experts|moe_num_experts")
_BIAS = re.compile(r"(\w+_)?bias")


def tiny(config_class: type, sizes: Sizes = TINY, **instead: Any) -> Any:
    """A tiny config of this class, with some keys, or keys of its parts, as they are given."""
    standard = config_class()
    changes = merged(_changes(standard, sizes), instead)
    config = config_class(**changes)
    again = {k: v for k, v in config.to_dict().items() if k not in changes and _is_by_layer(v, standard)}
    if again:
        config = config_class(**changes, **{k: _shortened(v) for k, v in again.items()})
    if hasattr(config, "attn_config"):
        # The class of this part no longer declares the key, and the model still reads it.
        config.attn_config.rope_theta = 10000.0
    return config


def has_experts(config: dict[str, Any]) -> bool:
    """Whether a config (as in config.json) is of a model with several routed experts."""
    mine = [v for k, v in config.items() if _EXPERT_COUNT.fullmatch(str(k))]
    return any(isinstance(v, int) and v > 1 for v in mine) or any(
        has_experts(v) for v in config.values() if isinstance(v, dict)
    )


def variant(config_class: type, name: str, sizes: Sizes = TINY) -> dict[str, Any] | None:
    """What makes a config one of a variant; None when it has no such key.

    ungrouped  as many key and value heads as query heads
    biases     every bias that the config knows the other way round
    tied       the other answer to whether the head is the embedding
    """
    standard = config_class().to_dict()
    if name == "ungrouped":
        return {"num_key_value_heads": sizes.heads} if "num_key_value_heads" in standard else None
    if name == "tied":
        key = "tie_word_embeddings"
        return {key: not standard[key]} if isinstance(standard.get(key), bool) else None
    if name == "biases":
        return {k: not v for k, v in standard.items() if _BIAS.fullmatch(k) and isinstance(v, bool)} or None
    raise ValueError(f"There is no variant {name}.")


def _changes(standard: Any, sizes: Sizes) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    changes: dict[str, Any] = {}
    values = standard.to_dict()
    layers = getattr(standard, "num_hidden_layers", None)
    for key, value in values.items():
        part = getattr(standard, key, None) if isinstance(value, dict) else None
        small = _small(key, sizes)
        if isinstance(part, PreTrainedConfig):
            changes[key] = _changes(part, sizes)
        elif isinstance(value, int) and not isinstance(value, bool) and small is not None:
            # One stays one (a single group, a single head), and none none; experts there are several.
            changes[key] = small if value > 1 or (value and _EXPERT_COUNT.fullmatch(key)) else value
        elif isinstance(value, list) and len(value) == layers and small is not None:
            changes[key] = [small] * LAYERS
        elif key.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            changes[key] = 0
    return changes | _what_goes_together(values, sizes)


def _what_goes_together(values: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    experts = [value for key, value in values.items() if _EXPERT_COUNT.fullmatch(key)]
    if values.get("kv_lora_rank") is not None:
        # Latent attention has as many key and value heads as query heads, and comes with yarn.
        changes |= {"num_key_value_heads": sizes.heads} if "num_key_value_heads" in values else {}
        changes |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **_ROPE}}
    if not experts and isinstance(values.get("intermediate_size"), int):
        # Without experts it is affordable; some loaders take four times the hidden size for granted.
        changes |= {"intermediate_size": 4 * sizes.heads * sizes.unit}
    if any(experts) and "num_experts_per_tok" in values and values["num_experts_per_tok"] is None:
        changes |= {"num_experts_per_tok": 2}
    if "topk_group" in values and values["topk_group"] is None:
        changes |= {"n_group": 2, "topk_group": 1}
    if "head_dim" in values and values["head_dim"] is None:
        changes |= {"head_dim": sizes.unit}
    if "layer_types" in values and values["layer_types"] is None and "conv_L_cache" in values:
        changes |= {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}
    rope = values.get("rope_parameters") or {}
    full = rope.get("full_attention")
    if isinstance(full, dict) and full.get("rope_type") == "default":
        changes |= {"rope_parameters": rope | {"full_attention": full | {"rope_type": "linear", "factor": 8.0}}}
    return changes


def _small(key: str, sizes: Sizes) -> int | None:
    return next((value for pattern, value in _rules(sizes) if re.fullmatch(pattern, key)), None)


def _is_by_layer(value: Any, standard: Any) -> bool:
    return isinstance(value, list) and len(value) == getattr(standard, "num_hidden_layers", None) != LAYERS


def _shortened(kinds: list[Any]) -> list[Any]:
    """A list of one item a layer, for fewer layers: every kind first, then as it begins."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct + kinds)[:LAYERS]
