"""Published checkpoints of images and sound, where they are otherwise than transformers writes them."""

from __future__ import annotations

from support.checkpoints.published import Published, Weights, after, renamed, with_tensors

_HEADS = {"vision_config": {"num_heads": 8}}
_NO_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": []}}


def _experts_transposed(weights: Weights) -> Weights:
    return {n: t.mT.contiguous() if ".experts." in n else t for n, t in weights.items()}


MULTIMODAL: dict[str, Published] = {
    "Ernie4_5_VLMoeForConditionalGeneration": Published(
        instead={
            "text_config": {"rope_parameters": {"mrope_section": [3, 3, 2], "rope_type": "default", "rope_theta": 5e5}},
            "vision_config": {"num_heads": 8},
        },
        config={"vision_config": {"embed_dim": 128, "mlp_ratio": 4}},
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
    "Lfm2VlForConditionalGeneration": Published(
        instead={
            "text_config": {"layer_types": ["conv", "full_attention"] * 2},
            "vision_config": {"vision_use_head": False},
        },
        tensors=renamed((r"vision_tower\.", "vision_tower.vision_model.")),
    ),
    "LlavaForConditionalGeneration": Published(
        instead={
            "tie_word_embeddings": False,
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "pixtral"},
        }
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
            }
        }
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
