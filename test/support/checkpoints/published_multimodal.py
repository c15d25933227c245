"""Published checkpoints of images and sound, where they are otherwise than transformers writes them."""

from __future__ import annotations

from support.checkpoints.published import Published, Weights, after, config_within, renamed, with_tensors

_HEADS = {"vision_config": {"num_heads": 8}}
_NO_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": []}}

_H = 128  # the width of tiny configs
_NORM = {"weight": (_H,), "bias": (_H,)}


def _parts(place: str, **layers: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters by the names of their layers."""
    return {f"{place}{layer}.{name}": shape for layer, shapes in layers.items() for name, shape in shapes.items()}


def _linear(out: int, width: int = _H) -> dict[str, tuple[int, ...]]:
    return {"weight": (out, width), "bias": (out,)}


_MOON_VIT = _parts(
    "vision_tower.patch_embed.", proj={"weight": (_H, 3, 14, 14), "bias": (_H,)}, pos_emb={"weight": (8, 8, _H)}
) | _parts("vision_tower.encoder.", final_layernorm=_NORM)
for _i in range(2):
    _MOON_VIT |= _parts(
        f"vision_tower.encoder.blocks.{_i}.", norm0=_NORM, norm1=_NORM, wqkv=_linear(3 * _H), wo=_linear(_H)
    ) | _parts(f"vision_tower.encoder.blocks.{_i}.mlp.", fc0=_linear(192), fc1=_linear(_H, 192))
_KIMI_PROJECTOR = _parts(
    "multi_modal_projector.", pre_norm=_NORM, linear_1=_linear(4 * _H, 4 * _H), linear_2=_linear(_H, 4 * _H)
)

_INTERN_VIT: dict[str, tuple[int, ...]] = _parts(
    "vision_model.embeddings.", patch_embedding={"weight": (_H, 3, 14, 14), "bias": (_H,)}
) | {
    "vision_model.embeddings.class_embedding": (1, 1, _H),
    "vision_model.embeddings.position_embedding": (1, 17, _H),
}
for _i in range(2):
    _INTERN_VIT |= _parts(f"vision_model.encoder.layers.{_i}.", norm1=_NORM, norm2=_NORM)
    _INTERN_VIT |= {f"vision_model.encoder.layers.{_i}.ls{n}": (_H,) for n in (1, 2)}
    _INTERN_VIT |= _parts(f"vision_model.encoder.layers.{_i}.attn.", qkv=_linear(3 * _H), proj=_linear(_H))
    _INTERN_VIT |= _parts(f"vision_model.encoder.layers.{_i}.mlp.", fc1=_linear(192), fc2=_linear(_H, 192))
_INTERN_VIT |= {f"mlp1.0.{name}": (4 * _H,) for name in ("weight", "bias")}
_INTERN_VIT |= {f"mlp1.1.{n}": s for n, s in _linear(_H, 4 * _H).items()}
_INTERN_VIT |= {f"mlp1.3.{n}": s for n, s in _linear(_H).items()}


_DOTS_VIT: dict[str, tuple[int, ...]] = _parts(
    "vision_tower.patch_embed.patchifier.", proj={"weight": (_H, 3, 14, 14), "bias": (_H,)}, norm={"weight": (_H,)}
) | {"vision_tower.post_trunk_norm.weight": (_H,)}
for _i in range(2):
    _DOTS_VIT |= {f"vision_tower.blocks.{_i}.norm{n}.weight": (_H,) for n in (1, 2)}
    _DOTS_VIT |= {f"vision_tower.blocks.{_i}.attn.{n}.weight": (out, _H) for n, out in (("qkv", 3 * _H), ("proj", _H))}
    _DOTS_VIT |= {f"vision_tower.blocks.{_i}.mlp.fc{n}.weight": (192, _H) for n in (1, 3)}
    _DOTS_VIT |= {f"vision_tower.blocks.{_i}.mlp.fc2.weight": (_H, 192)}
_DOTS_VIT |= _parts("vision_tower.merger.", ln_q=_NORM) | _parts(
    "vision_tower.merger.mlp.", **{"0": _linear(4 * _H, 4 * _H), "2": _linear(_H, 4 * _H)}
)

_AUDIO_TOWER: dict[str, tuple[int, ...]] = _parts(
    "thinker.audio_tower.",
    conv2d1={"weight": (32, 1, 3, 3), "bias": (32,)},
    conv2d2={"weight": (32, 32, 3, 3), "bias": (32,)},
    conv2d3={"weight": (32, 32, 3, 3), "bias": (32,)},
    conv_out={"weight": (_H, 512)},
    ln_post=_NORM,
    proj1=_linear(_H),
    proj2=_linear(_H),
)
for _i in range(2):
    _layer = f"thinker.audio_tower.layers.{_i}."
    _AUDIO_TOWER |= _parts(_layer, self_attn_layer_norm=_NORM, final_layer_norm=_NORM)
    _AUDIO_TOWER |= _parts(_layer, fc1=_linear(192), fc2=_linear(_H, 192))
    _AUDIO_TOWER |= _parts(f"{_layer}self_attn.", **{f"{x}_proj": _linear(_H) for x in ("q", "k", "v", "out")})


def _experts_transposed(weights: Weights) -> Weights:
    return {n: t.mT.contiguous() if ".experts." in n else t for n, t in weights.items()}


MULTIMODAL: dict[str, Published] = {
    "DotsOCRForCausalLM": Published(
        "Qwen2ForCausalLM",
        tensors=with_tensors(_DOTS_VIT),
        config={
            "model_type": "dots_ocr",
            "vision_config": {
                "embed_dim": _H,
                "hidden_size": _H,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "use_bias": False,
                "post_norm": True,
            },
        },
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Published(
        tensors=renamed((r"^model\.vision_model", "vision_model")),
        instead={
            "text_config": {
                "moe_intermediate_size": [64, 64],
                "rope_parameters": {"mrope_section": [3, 3, 2], "rope_type": "default", "rope_theta": 5e5},
            },
            "vision_config": {"num_heads": 8},
        },
        config={
            "vision_config": {"embed_dim": 128, "mlp_ratio": 4},
            "pixel_hidden_size": 128,
            "spatial_conv_size": 2,
            "temporal_conv_size": 2,
            "use_temporal_conv": True,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": [1, 1],
            "moe_layer_end_index": [3, 3],
            "moe_num_experts": [8, 8],
            "moe_intermediate_size": [64, 64],
        },
    ),
    "Gemma4ForConditionalGeneration": Published(
        instead={
            "vision_config": {
                "hidden_size": 128,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "head_dim": 16,
                "global_head_dim": 16,
            }
        },
        # SGLang itself turns round what it reads of a whole config.
        config={"text_config": {"head_dim": 16}},
    ),
    "Gemma3ForConditionalGeneration": Published(
        instead={"vision_config": {"vision_use_head": False}},
        tensors=renamed((r"vision_tower\.", "vision_tower.vision_model.")),
    ),
    "Glm4vForConditionalGeneration": Published(instead=_HEADS),
    "Glm4vMoeForConditionalGeneration": Published(instead=_HEADS),
    "InternVLChatModel": Published(
        "Qwen3ForCausalLM",
        tensors=after(renamed(("^", "language_model.")), with_tensors(_INTERN_VIT)),
        config=config_within(
            "llm_config",
            model_type="internvl_chat",
            llm_config={"architectures": ["Qwen3ForCausalLM"]},
            vision_config={
                "architectures": ["InternVisionModel"],
                "model_type": "intern_vit_6b",
                "hidden_size": _H,
                "image_size": 56,
                "patch_size": 14,
                "intermediate_size": 192,
                "num_attention_heads": 8,
                "num_hidden_layers": 2,
                "norm_type": "layer_norm",
                "qk_normalization": False,
                "qkv_bias": True,
            },
            select_layer=-1,
            force_image_size=56,
            downsample_ratio=0.5,
            ps_version="v2",
        ),
    ),
    "KimiVLForConditionalGeneration": Published(
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None},
        after(renamed(("^", "language_model.")), with_tensors(_MOON_VIT | _KIMI_PROJECTOR)),
        config_within(
            "text_config",
            model_type="kimi_vl",
            vision_config={
                "model_type": "moonvit",
                "hidden_size": _H,
                "intermediate_size": 192,
                "num_attention_heads": 8,
                "num_hidden_layers": 2,
                "patch_size": 14,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
                "merge_kernel_size": [2, 2],
            },
        ),
    ),
    "Lfm2VlForConditionalGeneration": Published(
        instead={
            "text_config": {"layer_types": ["conv", "full_attention"] * 2},
            "vision_config": {"vision_use_head": False},
        },
        tensors=renamed((r"vision_tower\.", "vision_tower.vision_model.")),
    ),
    "LightOnOCRForConditionalGeneration": Published(
        "LightOnOcrForConditionalGeneration", config={"vision_config": {"rope_theta": 10000.0}}
    ),
    "LlavaForConditionalGeneration": Published(
        instead={
            "tie_word_embeddings": False,
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "pixtral"},
        }
    ),
    "MiniCPMV4_6ForConditionalGeneration": Published(
        instead={"text_config": {"model_type": "qwen3_5_text"}, "vision_config": {"model_type": "minicpmv4_6_vision"}}
    ),
    "Mistral3ForConditionalGeneration": Published(instead={"tie_word_embeddings": False}),
    "PaddleOCRVLForConditionalGeneration": Published(
        # transformers leaves out what it does not use.
        tensors=with_tensors({"visual.vision_model.embeddings.packing_position_embedding.weight": (32768, 128)}),
    ),
    "Qwen2AudioForConditionalGeneration": Published(
        instead={"audio_config": {"encoder_attention_heads": 8, "encoder_layers": 2}}
    ),
    "Qwen3OmniMoeForConditionalGeneration": Published(
        instead={
            "enable_audio_output": False,
            "thinker_config": {
                "audio_config": {"encoder_attention_heads": 8, "encoder_layers": 2},
                "vision_config": {"num_heads": 8},
            },
        }
    ),
    "Qwen3ASRForConditionalGeneration": Published(
        "Qwen3ForCausalLM",
        tensors=after(renamed(("^", "thinker.")), with_tensors(_AUDIO_TOWER)),
        config=lambda written: {
            "architectures": written["architectures"],
            "model_type": "qwen3_asr",
            "thinker_config": {
                "model_type": "qwen3_asr",
                "text_config": written,
                "audio_config": {
                    "d_model": _H,
                    "encoder_layers": 2,
                    "encoder_attention_heads": 8,
                    "encoder_ffn_dim": 192,
                    "downsample_hidden_size": 32,
                    "output_dim": _H,
                    "num_mel_bins": 128,
                },
            },
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": Published(tensors=_experts_transposed),
    "Qwen3_5ForConditionalGeneration": Published(instead=_NO_DEEPSTACK),
    "Qwen3_5MoeForConditionalGeneration": Published(instead=_NO_DEEPSTACK),
    "WhisperForConditionalGeneration": Published(
        instead={
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 512,
            "decoder_ffn_dim": 512,
            "max_source_positions": 64,
            "max_target_positions": 64,
        }
    ),
}
