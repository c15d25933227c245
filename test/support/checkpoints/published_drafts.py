"""Checkpoints with what a draft model reads: a layer of the target's own checkpoint, or a checkpoint beside it."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from support.checkpoints.published import Draft, Published, Weights, after, renamed
from support.checkpoints.published_experts import EXPERTS

HOT_TOKENS = 64  # of EAGLE-3's head


def of_layer(weights: Weights, layer: int, prefix: str = "model.") -> Weights:
    """The tensors of a layer, by their names in it."""
    whole = f"{prefix}layers.{layer}."
    return {name.removeprefix(whole): t for name, t in weights.items() if name.startswith(whole)}


def copied(
    to: str, *, layer: int = 3, prefix: str = "model.", fusion: str, norms: tuple[str, ...]
) -> Callable[[Weights], Weights]:
    """A copy of a layer under another name, a projection of two hidden states to one, and norms.

    Names of the projection and the norms are whole, with the place of `to` as {}.
    """

    def add(weights: Weights) -> Weights:
        own = {to + name: t.clone() for name, t in of_layer(weights, layer, prefix).items()}
        norm = own[f"{to}input_layernorm.weight"] if f"{to}input_layernorm.weight" in own else own[f"{to}norm.weight"]
        width = len(norm)
        own[fusion.format(to)] = norm.new_ones(width, 2 * width)
        return weights | own | {name.format(to): norm.clone() for name in norms}

    return add


def _next_layer(weights: Weights) -> Weights:
    """The layer after the last one, with DeepSeek's names for what joins it to the target."""
    joining = ("{}shared_head.norm.weight", "{}enorm.weight", "{}hnorm.weight")
    found = copied("model.layers.4.", fusion="{}eh_proj.weight", norms=joining)(weights)
    return found | {
        "model.layers.4.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.4.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }


_MTP = {
    "fusion": "mtp.fc.weight",
    "norms": ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
}
_ONE_LAYER = {"num_nextn_predict_layers": 1}


def _eagle(weights: Weights) -> Weights:
    """The first EAGLE's draft: a layer without its first norm, and a projection of embedding and hidden state."""
    layer = {f"layers.0.{n}": t.clone() for n, t in of_layer(weights, 0).items() if n != "input_layernorm.weight"}
    hidden = weights["model.norm.weight"]
    return layer | {"fc.weight": hidden.new_ones(len(hidden), 2 * len(hidden)), "fc.bias": hidden.clone()}


def _eagle3(weights: Weights) -> Weights:
    """EAGLE-3's: a layer of embedding and hidden state together, a head of its own, and its tokens' numbers."""
    layer = {f"midlayer.{n}": t.clone() for n, t in of_layer(weights, 0).items()}
    for name in [n for n in layer if re.search("[qkv]_proj.weight", n)]:
        layer[name] = layer[name].repeat(1, 2)
    hidden = weights["model.norm.weight"]
    own = {"fc.weight": hidden.new_ones(len(hidden), 3 * len(hidden)), "norm.weight": hidden.clone()}
    own["lm_head.weight"] = hidden.new_ones(HOT_TOKENS, len(hidden))
    own["d2t"] = torch.zeros(HOT_TOKENS, dtype=torch.int64)
    return layer | {"midlayer.hidden_norm.weight": hidden.clone()} | own


DRAFTS: dict[str, Published] = {
    "DeepseekV3ForCausalLMNextN": Published(
        "DeepseekV3ForCausalLM", tensors=_next_layer, config=_ONE_LAYER, draft=Draft("DeepseekV3ForCausalLM")
    ),
    "Ernie4_5_MoeForCausalLMMTP": Published(
        "Ernie4_5_MoeForCausalLM",
        tensors=copied(
            "model.mtp_block.0.",
            layer=0,
            fusion="model.mtp_linear_proj.0.weight",
            norms=("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
        ),
        config=_ONE_LAYER,
        draft=Draft("Ernie4_5_MoeForCausalLM"),
    ),
    "ExaoneMoEForCausalLMMTP": Published(
        "ExaoneMoeForCausalLM",
        tensors=copied("mtp.layers.0.", layer=0, **_MTP),
        draft=Draft("ExaoneMoEForCausalLM"),
    ),
    "Glm4MoeForCausalLMNextN": Published(
        "Glm4MoeForCausalLM", tensors=_next_layer, config=_ONE_LAYER, draft=Draft("Glm4MoeForCausalLM")
    ),
    "HYV3ForCausalLMNextN": Published(
        "HYV3ForCausalLM",
        tensors=copied(
            "model.layers.4.",
            fusion="{}eh_proj.weight",
            norms=("{}enorm.weight", "{}hnorm.weight", "model.shared_head.norm.weight"),
        ),
        config=_ONE_LAYER,
        draft=Draft("HYV3ForCausalLM"),
    ),
    "LlamaForCausalLMEagle": Published("LlamaForCausalLM", draft=Draft("LlamaForCausalLM", _eagle)),
    "LlamaForCausalLMEagle3": Published(
        "LlamaForCausalLM", draft=Draft("LlamaForCausalLM", _eagle3, {"draft_vocab_size": HOT_TOKENS})
    ),
    "MiMoMTP": Published(
        "Qwen2ForCausalLM",
        tensors=copied(
            "model.mtp_layers.0.",
            fusion="{}input_proj.weight",
            norms=("{}token_layernorm.weight", "{}hidden_layernorm.weight", "{}final_layernorm.weight"),
        ),
        config=_ONE_LAYER,
        draft=Draft("MiMoForCausalLM"),
    ),
    "NemotronHForCausalLMMTP": Published(
        "NemotronHForCausalLM",
        tensors=after(
            renamed((r"backbone\.embedding\.", "backbone.embeddings.")),
            copied(
                "mtp.layers.0.",
                layer=2,
                prefix="backbone.",
                fusion="{}eh_proj.weight",
                norms=("{}enorm.weight", "{}hnorm.weight"),
            ),
            copied(
                "mtp.layers.1.",
                layer=1,
                prefix="backbone.",
                fusion="mtp.layers.0.eh_proj.weight",
                norms=("{}final_layernorm.weight",),
            ),
        ),
        config=_ONE_LAYER | {"mtp_hybrid_override_pattern": "*E"},
        draft=Draft("NemotronHForCausalLM"),
    ),
    "Qwen2ForCausalLMEagle": Published(
        "Qwen2ForCausalLM", draft=Draft("Qwen2ForCausalLM", _eagle, {"layer_types": ["full_attention"]})
    ),
    "Qwen3NextForCausalLMMTP": Published(
        "Qwen3NextForCausalLM",
        tensors=copied("mtp.layers.0.", **_MTP),
        draft=Draft("Qwen3NextForCausalLM"),
    ),
    "Qwen3_5ForCausalLMMTP": Published(
        "Qwen3_5ForConditionalGeneration",
        {"vision_config": {"deepstack_visual_indexes": []}},
        copied("mtp.layers.0.", prefix="model.language_model.", **_MTP),
        draft=Draft("Qwen3_5ForConditionalGeneration"),
    ),
    "Step3p5MTP": Published(
        "Glm4MoeForCausalLM",
        EXPERTS["Step3p5ForCausalLM"].instead,
        after(
            EXPERTS["Step3p5ForCausalLM"].tensors,
            copied(
                "model.layers.4.",
                layer=0,
                fusion="{}eh_proj.weight",
                norms=("{}enorm.weight", "{}hnorm.weight", "{}transformer.shared_head.norm.weight"),
            ),
            lambda weights: (
                weights | {"model.layers.4.transformer.shared_head.output.weight": weights["lm_head.weight"].clone()}
            ),
        ),
        # SGLang takes the published model's 45 layers for granted.
        {k: v * 12 if isinstance(v, list) else v for k, v in EXPERTS["Step3p5ForCausalLM"].config.items()} | _ONE_LAYER,
        Draft("Step3p5ForCausalLM"),
    ),
}
