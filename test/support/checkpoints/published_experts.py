"""Published checkpoints of models with experts, and of those with latent, linear or state-space attention."""

from __future__ import annotations

from support.checkpoints.published import Published, after, joined, renamed, stacked, with_layers, without

_GLM = "Glm4MoeForCausalLM"
_H, _HEAD, _HEADS, _KV = 128, 16, 8, 2  # as in tiny configs
MUP = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}

_BAILING_NAMES = after(
    joined("query_key_value", "q_proj", "k_proj", "v_proj"),
    renamed(
        (r"model\.embed_tokens", "model.word_embeddings"),
        (r"self_attn\.o_proj", "attention.dense"),
        (r"self_attn\.q_norm", "attention.query_layernorm"),
        (r"self_attn\.k_norm", "attention.key_layernorm"),
        ("self_attn", "attention"),
        (r"gate\.e_score_correction_bias", "gate.expert_bias"),
    ),
)
_BAILING_CONFIG = {
    "num_experts": 8,
    "num_shared_experts": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "embedding_dropout": 0.0,
    "use_qk_norm": True,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
}
_BAILING = Published(_GLM, {"use_qk_norm": True}, _BAILING_NAMES, _BAILING_CONFIG)
# The first version has no norm of queries, and no bias of experts.
_BAILING_1 = Published(
    _GLM,
    tensors=after(without("e_score_correction_bias"), _BAILING_NAMES),
    config=_BAILING_CONFIG
    | {"use_qk_norm": False, "moe_router_enable_expert_bias": False, "score_function": "softmax", "norm_head": True},
)


def _kimi_delta() -> dict[str, tuple[int, ...]]:
    """A layer of linear attention."""
    wide = _HEADS * _HEAD
    names = {f"{x}_proj.weight": (wide, _H) for x in "qkv"} | {f"{x}_conv1d.weight": (wide, 1, 4) for x in "qkv"}
    gates = {f"{x}_a_proj.weight": (_HEAD, _H) for x in "fg"} | {f"{x}_b_proj.weight": (wide, _HEAD) for x in "fg"}
    own = {"A_log": (1, 1, _HEADS, 1), "dt_bias": (wide,), "b_proj.weight": (_HEADS, _H), "o_norm.weight": (_HEAD,)}
    return {f"self_attn.{n}": s for n, s in (names | gates | own | {"o_proj.weight": (_H, wide)}).items()}


_STEP_LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]

EXPERTS: dict[str, Published] = {
    "BailingMoEForCausalLM": _BAILING_1,
    "BailingMoeForCausalLM": _BAILING_1,
    "BailingMoeV2ForCausalLM": _BAILING,
    "DeepseekForCausalLM": Published("Glm4MoeForCausalLM", tensors=without("e_score_correction_bias")),
    "Grok1ForCausalLM": Published(
        "MixtralForCausalLM",
        tensors=after(
            renamed(("input_layernorm", "pre_attn_norm"), ("post_attention_layernorm", "post_attn_norm")),
            with_layers(range(4), {"pre_moe_norm.weight": (_H,), "post_moe_norm.weight": (_H,)}),
        ),
        config={
            "load_presharded_moe": False,
            "embedding_multiplier_scale": 78.38,
            "output_multiplier_scale": 0.577,
        },
    ),
    "KimiLinearForCausalLM": Published(
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None},
        after(
            without(r"layers\.[012]\.self_attn"),
            with_layers(range(3), _kimi_delta()),
            renamed(
                (r"layers\.([1-9])\.mlp", r"layers.\1.block_sparse_moe"),
                (r"(experts\.\d+)\.gate_proj", r"\1.w1"),
                (r"(experts\.\d+)\.down_proj", r"\1.w2"),
                (r"(experts\.\d+)\.up_proj", r"\1.w3"),
            ),
        ),
        {
            "model_type": "kimi_linear",
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "head_dim": _HEAD,
                "num_heads": _HEADS,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "LLaDA2MoeModelLM": _BAILING,
    # Without what transformers 5 has made of rope_theta: SGLang's class of its config takes no such key.
    "LongcatFlashForCausalLM": Published(config=lambda c: {k: v for k, v in c.items() if k != "rope_parameters"}),
    "MiMoV2FlashForCausalLM": Published(
        _GLM,
        tensors=after(
            without("shared_experts"),
            with_layers(range(1, 4), {"self_attn.attention_sink_bias": (_HEADS,)}),
        ),
        config={
            "moe_layer_freq": [0, 1, 1, 1],
            "hybrid_layer_pattern": [0, 1, 1, 1],
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_shared_experts": 0,
            "layernorm_epsilon": 1e-5,
            "v_head_dim": _HEAD,
            "swa_num_attention_heads": _HEADS,
            "swa_num_key_value_heads": _KV,
            "swa_head_dim": _HEAD,
            "swa_v_head_dim": _HEAD,
            "swa_rope_theta": 10000.0,
            "rope_theta": 5000000.0,
            "sliding_window": 64,
            "sliding_window_size": 64,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_value_scale": 0.707,
        },
    ),
    "MiniCPM3ForCausalLM": Published("DeepseekV3ForCausalLM", {"first_k_dense_replace": 4}, config=MUP),
    "MistralLarge3ForCausalLM": Published(
        "DeepseekV3ForCausalLM",
        tensors=renamed(
            (r"^model\.norm", "norm"),
            (r"^model\.embed_tokens", "tok_embeddings"),
            (r"^lm_head", "output"),
            (r"^model\.", ""),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            (r"self_attn\.(q|kv)_a_layernorm", r"attention.\1_a_norm"),
            (r"self_attn\.q_a_proj", "attention.wq_a"),
            (r"self_attn\.q_b_proj", "attention.wq_b"),
            (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
            (r"self_attn\.kv_b_proj", "attention.wkv_b"),
            (r"self_attn\.o_proj", "attention.wo"),
            (r"mlp\.gate\.e_score_correction_bias", "router_biases"),
            (r"mlp\.gate\.", "gate."),
            (r"mlp\.(experts\.\d+|shared_experts)", r"\1"),
            (r"\.mlp\.", ".feed_forward."),
            ("gate_proj", "w1"),
            ("down_proj", "w2"),
            ("up_proj", "w3"),
        ),
    ),
    "NemotronHForCausalLM": Published(tensors=renamed(("backbone.embedding.", "backbone.embeddings."))),
    "SDARMoeForCausalLM": Published("Qwen3MoeForCausalLM"),
    "SarvamMLAForCausalLM": Published(
        "DeepseekV3ForCausalLM", {"q_lora_rank": None}, config={"num_experts": 8, "num_shared_experts": 1}
    ),
    "SarvamMoEForCausalLM": _BAILING,
    "Step3p5ForCausalLM": Published(
        _GLM,
        {"use_qk_norm": True},
        after(
            stacked(r"mlp\.experts\.\d+\.", "moe."),
            renamed(
                (r"mlp\.gate\.e_score_correction_bias", "moe.router_bias"),
                (r"mlp\.gate\.", "moe.gate."),
                (r"mlp\.shared_experts", "share_expert"),
            ),
            with_layers(range(4), {"self_attn.g_proj.weight": (_HEADS, _H)}),
        ),
        {
            "model_type": "step3p5",
            "num_attention_groups": _KV,
            "max_seq_len": 512,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "moe_layers_enum": "1,2,3",
            "moe_router_scaling_factor": 3.0,
            "share_expert_dim": 64,
            "share_expert_dims": 64,
            "need_fp32_gate": True,
            "use_moe_router_bias": True,
            "use_head_wise_attn_gate": True,
            "swiglu_limits": [0.0] * 4,
            "swiglu_limits_shared": [0.0] * 4,
            "layer_types": _STEP_LAYERS,
            "yarn_only_types": ["full_attention"],
            "rope_theta": [10000.0] * 4,
            "rope_scaling": None,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
            "sliding_window": 64,
            "attention_other_setting": {"num_attention_heads": _HEADS, "num_attention_groups": _KV},
        },
    ),
    "XverseMoeForCausalLM": Published(
        "Qwen2MoeForCausalLM",
        {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192},
        after(
            without(r"shared_expert_gate|_proj\.bias"),
            renamed((r"mlp\.gate\.", "mlp.router."), ("shared_expert", "shared_experts")),
        ),
        {"num_shared_experts": 1, "moe_top_k": 2},
    ),
}
EXPERTS["Grok1ModelForCausalLM"] = EXPERTS["Grok1ForCausalLM"]
