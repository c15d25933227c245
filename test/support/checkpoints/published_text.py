"""Published checkpoints of language models, where they are otherwise than transformers writes them, or it has none."""

from __future__ import annotations

from support.checkpoints.published import (
    Published,
    Weights,
    after,
    biased,
    joined,
    renamed,
    stacked,
    with_layers,
    with_tensors,
    without,
)

_LLAMA = "LlamaForCausalLM"

_GLM = "Glm4MoeForCausalLM"
_H, _HEAD, _HEADS, _KV = 128, 16, 8, 2  # as in tiny configs
_MUP = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}

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


def _kimi_delta(_: int) -> dict[str, tuple[int, ...]]:
    """A layer of linear attention."""
    wide = _HEADS * _HEAD
    names = {f"{x}_proj.weight": (wide, _H) for x in "qkv"} | {f"{x}_conv1d.weight": (wide, 1, 4) for x in "qkv"}
    gates = {f"{x}_a_proj.weight": (_HEAD, _H) for x in "fg"} | {f"{x}_b_proj.weight": (wide, _HEAD) for x in "fg"}
    own = {"A_log": (1, 1, _HEADS, 1), "dt_bias": (wide,), "b_proj.weight": (_HEADS, _H), "o_norm.weight": (_HEAD,)}
    return {f"self_attn.{n}": s for n, s in (names | gates | own | {"o_proj.weight": (_H, wide)}).items()}


def _attention_of_layers(pattern: str) -> str:
    return rf"layers\.{pattern}\.self_attn"


_STEP_LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]

TEXT: dict[str, Published] = {
    "BaichuanForCausalLM": Published(
        _LLAMA, {"num_key_value_heads": 8}, joined("W_pack", "q_proj", "k_proj", "v_proj")
    ),
    "BailingMoEForCausalLM": _BAILING_1,
    "BailingMoeForCausalLM": _BAILING_1,
    "BailingMoeV2ForCausalLM": _BAILING,
    "ChatGLMModel": Published(
        _LLAMA,
        tensors=after(
            joined("query_key_value", "q_proj", "k_proj", "v_proj"),
            joined("dense_h_to_4h", "gate_proj", "up_proj"),
            renamed(
                (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
                (r"model\.layers", "transformer.encoder.layers"),
                (r"model\.norm", "transformer.encoder.final_layernorm"),
                ("self_attn", "self_attention"),
                ("o_proj", "dense"),
                ("down_proj", "dense_4h_to_h"),
                ("lm_head", "transformer.output_layer"),
            ),
            biased("query_key_value"),
        ),
        config={
            "model_type": "chatglm",
            "num_layers": 4,
            "padded_vocab_size": 509,
            "ffn_hidden_size": 512,
            "kv_channels": _HEAD,
            "seq_length": 512,
            "multi_query_attention": True,
            "multi_query_group_num": _KV,
            "add_qkv_bias": True,
        },
    ),
    "DeepseekForCausalLM": Published("Glm4MoeForCausalLM", tensors=without("e_score_correction_bias")),
    "ExaoneForCausalLM": Published(
        _LLAMA,
        tensors=renamed(
            (r"model\.embed_tokens", "transformer.wte"),
            (r"model\.layers", "transformer.h"),
            (r"model\.norm", "transformer.ln_f"),
            (r"self_attn\.o_proj", "attn.attention.out_proj"),
            ("self_attn", "attn.attention"),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
        ),
        config={"model_type": "exaone", "activation_function": "silu", "layer_norm_epsilon": 1e-5, "num_layers": 4},
    ),
    "InternLM2ForCausalLM": Published(
        _LLAMA,
        tensors=after(
            joined("wqkv", "q_proj", "k_proj", "v_proj"),
            renamed(
                ("embed_tokens", "tok_embeddings"),
                ("self_attn", "attention"),
                ("o_proj", "wo"),
                (r"mlp\.gate_proj", "feed_forward.w1"),
                (r"mlp\.up_proj", "feed_forward.w3"),
                (r"mlp\.down_proj", "feed_forward.w2"),
                ("input_layernorm", "attention_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("lm_head", "output"),
            ),
        ),
    ),
    "IQuestLoopCoderForCausalLM": Published(
        _LLAMA,
        tensors=after(
            with_layers(range(4), lambda _: {"gate.weight": (_HEADS, _HEAD), "gate.bias": (_HEADS,)}),
            renamed((r"model\.layers\.(\d)\.gate\.", r"model.gate_projections.\1.")),
        ),
        config={"loop_num": 2, "loop_window_size": 64},
    ),
    "Grok1ForCausalLM": Published(
        "MixtralForCausalLM",
        tensors=after(
            renamed(("input_layernorm", "pre_attn_norm"), ("post_attention_layernorm", "post_attn_norm")),
            with_layers(range(4), lambda _: {"pre_moe_norm.weight": (_H,), "post_moe_norm.weight": (_H,)}),
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
            without(_attention_of_layers("[012]")),
            with_layers(range(3), _kimi_delta),
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
    "LlamaForClassification": Published(
        _LLAMA, tensors=with_tensors({"classification_head.weight": (4, _H)}), config={"classification_out_size": 4}
    ),
    # Without what transformers 5 has made of rope_theta: SGLang's class of its config takes no such key.
    "LongcatFlashForCausalLM": Published(config=lambda c: {k: v for k, v in c.items() if k != "rope_parameters"}),
    "MiMoForCausalLM": Published("Qwen2ForCausalLM"),
    "MiMoV2FlashForCausalLM": Published(
        _GLM,
        tensors=after(
            without("shared_experts"),
            with_layers(range(1, 4), lambda _: {"self_attn.attention_sink_bias": (_HEADS,)}),
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
    "MiniCPMForCausalLM": Published(
        _LLAMA, config=_MUP
    ),
    "MiniCPM3ForCausalLM": Published("DeepseekV3ForCausalLM", {"first_k_dense_replace": 4}, config=_MUP),
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
    "OrionForCausalLM": Published(_LLAMA, tensors=biased("norm")),
    "Phi3SmallForCausalLM": Published(
        _LLAMA,
        tensors=after(
            joined("query_key_value", "q_proj", "k_proj", "v_proj"),
            joined("mlp.up_proj", "mlp.gate_proj", "mlp.up_proj"),
            renamed(("o_proj", "dense"), (r"model\.norm", "model.final_layernorm")),
            biased("query_key_value|dense|mlp|norm"),
            without("lm_head"),
        ),
        config={
            "tie_word_embeddings": True,
            "hidden_act": "gegelu",
            "gegelu_limit": 20.0,
            "mup_embedding_multiplier": 10.0,
            "mup_width_multiplier": 8.0,
            "mup_attn_multiplier": 1.0,
            "mup_use_scaling": True,
            "layer_norm_epsilon": 1e-5,
            "rope_embedding_base": 1000000,
            "rope_position_scale": 1.0,
            "blocksparse_block_size": 64,
            "blocksparse_homo_head_pattern": False,
            "blocksparse_num_local_blocks": 16,
            "blocksparse_vert_stride": 8,
            "blocksparse_triton_kernel_block_size": 64,
            "dense_attention_every_n_layers": 2,
            "dummy_token_indices": [],
        },
    ),
    "QWenLMHeadModel": Published(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 8, "vocab_size": 512},
        after(
            joined("c_attn", "q_proj", "k_proj", "v_proj"),
            renamed(
                (r"model\.embed_tokens", "transformer.wte"),
                (r"model\.layers", "transformer.h"),
                (r"model\.norm", "transformer.ln_f"),
                (r"self_attn\.o_proj", "attn.c_proj"),
                ("self_attn", "attn"),
                (r"mlp\.gate_proj", "mlp.w2"),
                (r"mlp\.up_proj", "mlp.w1"),
                (r"mlp\.down_proj", "mlp.c_proj"),
                ("input_layernorm", "ln_1"),
                ("post_attention_layernorm", "ln_2"),
            ),
        ),
        # A vocabulary of whole blocks of 64. Twice the rows of each of its halves.
        {"intermediate_size": 1024, "layer_norm_epsilon": 1e-6},
    ),
    "SDARForCausalLM": Published("Qwen3ForCausalLM"),
    "SDARMoeForCausalLM": Published("Qwen3MoeForCausalLM"),
    "SolarForCausalLM": Published(
        _LLAMA,
        config={
            "bskcn_1": [1],
            "bskcn_2": [2],
            "bskcn_3": [2],
            "bskcn_4": [3],
            "bskcn_tv": [0.9, 0.8],
        },
    ),
    "SarvamMoEForCausalLM": _BAILING,
    "SarvamMLAForCausalLM": Published(
        "DeepseekV3ForCausalLM", {"q_lora_rank": None}, config={"num_experts": 8, "num_shared_experts": 1}
    ),
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
            with_layers(range(4), lambda _: {"self_attn.g_proj.weight": (_HEADS, _H)}),
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
TEXT["Grok1ModelForCausalLM"] = TEXT["Grok1ForCausalLM"]
