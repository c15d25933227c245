"""The keys of published config.json files that transformers 5 folds into newer ones, or drops.

Its config classes read the old keys and write the new; SGLang reads the old ones of some. These rules
go the other way, by key: no model is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from support.checkpoints.tiny_configs import has_experts

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}


def published(config: dict[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """The config as it would come with a checkpoint of these tensors."""
    names = list(tensors)
    config = {k: _part(v) if isinstance(v, dict) and "model_type" in v else v for k, v in config.items()}
    old = _of_tensors(config, names) | _of_layer_kinds(config) | _of_rope(config) | _of_names(config)
    # SGLang's wrapper of models that it has no class for reads transformers' own config.
    wrapped = any(name.startswith("Transformers") for name in config.get("architectures") or ())
    return old | config | ({} if wrapped else _of_meaning(config))


def published_multimodal(config: dict[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """The same of a model with a language model in it, whose config is a part of the whole."""
    parts = {"text_config": published(config["text_config"], tensors)}
    if "in_channels" in (config.get("vision_config") or {}):
        parts["vision_config"] = config["vision_config"] | {"in_chans": config["vision_config"]["in_channels"]}
    return config | parts


def _part(config: dict[str, Any]) -> dict[str, Any]:
    """A config within a config, without what transformers' base class adds to each, nor the whole's width."""
    from transformers import PreTrainedConfig

    return {k: v for k, v in config.items() if k not in (*PreTrainedConfig().to_dict(), "hidden_size")}


def _of_tensors(config: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What the tensors say: a layer that has weights is switched on."""
    old: dict[str, Any] = {}
    if any(name.endswith("e_score_correction_bias") for name in names):
        old |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "use_routing_bias": True}
    if any(name.endswith(("q_norm.weight", "query_layernorm.weight")) for name in names):
        old |= {"use_qk_norm": True}
    if any(name.endswith("experts.gate_up_proj_bias") for name in names):
        old |= {"swiglu_limit": 7.0}
    if any("shared_mlp" in name for name in names):
        old |= {"use_mixed_mlp_moe": True, "num_shared_expert": 1}
    return old


def _of_layer_kinds(config: dict[str, Any]) -> dict[str, Any]:
    """Lists with a word for each layer used to be intervals and counts."""
    old: dict[str, Any] = {}
    layers, mlps = config.get("layer_types"), config.get("mlp_layer_types")
    if layers and "linear_attention" in layers and "full_attention" in layers:
        old |= {"full_attention_interval": layers.index("full_attention") + 1}
    if layers and config.get("compress_rates"):
        old |= {"compress_ratios": [config["compress_rates"].get(kind, 0) for kind in layers]}
    if mlps:
        old |= {"is_moe_layer": [kind != "dense" for kind in mlps]}
        old |= {"first_k_dense_replace": next((i for i, kind in enumerate(mlps) if kind != "dense"), len(mlps))}
        old |= {"num_hash_layers": mlps.count("hash_moe")}
    if mlps or "first_k_dense_replace" in config:
        old |= {"moe_layer_freq": 1}
    return old


def _of_rope(config: dict[str, Any]) -> dict[str, Any]:
    """One set of rotary parameters for each kind of layer used to be a base for each."""
    by_kind = config.get("rope_parameters") or {}
    full, local = by_kind.get("full_attention"), by_kind.get("sliding_attention")
    old = {"rope_theta": by_kind["rope_theta"]} if "rope_theta" in by_kind else {}
    if full:
        old |= {"rope_theta": full.get("rope_theta")}
    if local:
        old |= {"rope_local_base_freq": local.get("rope_theta")}
    return old


def _of_names(config: dict[str, Any]) -> dict[str, Any]:
    old = {"hidden_act": config["hidden_activation"]} if "hidden_activation" in config else {}
    if config.get("num_attention_heads") and config.get("hidden_size"):
        old |= {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    if "intermediate_size" in config and has_experts(config):
        old |= {"moe_intermediate_size": config["intermediate_size"]}
    # How routing weights are scaled: no tensor's shape hangs on it, and SGLang wants it said.
    return old | ({"route_norm": True} if "router_scaling_factor" in config else {})


def _of_meaning(config: dict[str, Any]) -> dict[str, Any]:
    """Keys that hold something else in published configs, or (head_dim) in SGLang once it has read them."""
    other: dict[str, Any] = {}
    if "global_head_dim" in config:
        local = config["head_dim"]
        other |= {"head_dim": config["global_head_dim"], "swa_head_dim": local, "swa_v_head_dim": local}
    rope = config.get("rope_parameters") or {}
    if "compress" in rope:
        other |= {"rope_parameters": rope["main"] | _YARN}
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int):
        other |= {"sliding_window_pattern": "L" * (pattern - 1) + "G"}
    return other
