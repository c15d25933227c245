"""Published checkpoints of dense language models, where they are otherwise than transformers writes them."""

from __future__ import annotations

from support.checkpoints.published import Published, after, biased, joined, renamed, with_layers, with_tensors, without
from support.checkpoints.published_experts import MUP

_LLAMA = "LlamaForCausalLM"
_H, _HEAD, _HEADS, _KV = 128, 16, 8, 2  # as in tiny configs

DENSE: dict[str, Published] = {
    "BaichuanForCausalLM": Published(
        _LLAMA, {"num_key_value_heads": 8}, joined("W_pack", "q_proj", "k_proj", "v_proj")
    ),
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
            with_layers(range(4), {"gate.weight": (_HEADS, _HEAD), "gate.bias": (_HEADS,)}),
            renamed((r"model\.layers\.(\d)\.gate\.", r"model.gate_projections.\1.")),
        ),
        config={"loop_num": 2, "loop_window_size": 64},
    ),
    "LlamaForClassification": Published(
        _LLAMA, tensors=with_tensors({"classification_head.weight": (4, _H)}), config={"classification_out_size": 4}
    ),
    "MiMoForCausalLM": Published("Qwen2ForCausalLM"),
    "MiniCPMForCausalLM": Published(_LLAMA, config=MUP),
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
}
