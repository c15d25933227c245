"""Run by test_megatron_bridge.py: as megatron_job.py, with Megatron-Bridge itself and Transformer Engine's names."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from support import megatron_bridge_env


def main(release: str, cases: list[dict[str, Any]]) -> None:
    megatron_bridge_env.use(release)
    import megatron_job  # with the transformers of that environment
    from support.megatron_models import STACKED
    from support.transformer_engine_names import rename

    AutoBridge = megatron_bridge_env.auto_bridge()

    def bridge(case: Any, model: Any, models: list[Any]) -> Any:
        for chunk in models if case.kind != "llama" else ():
            rename(chunk)
        if case.kind == STACKED:
            models[:] = [wrapped(chunk) for chunk in models]
            model = with_images(case)
        folder = tempfile.TemporaryDirectory()
        model.save_pretrained(folder.name)
        made = AutoBridge.from_hf_pretrained(folder.name)
        made.folder = folder  # as long as the bridge, which reads names and shapes in it
        return made

    megatron_job.main([(megatron_job.Case(**case), bridge) for case in cases])


def wrapped(text: Any) -> Any:
    """Returns a model with images, as far as its text model goes."""
    from torch import nn

    model = nn.Module()
    model.language_model, model.config = text, text.config
    return model


def with_images(case: Any) -> Any:
    """Returns the transformers model of that architecture, whose names and config Megatron-Bridge reads."""
    import transformers

    text = {
        "vocab_size": case.vocabulary, "hidden_size": case.hidden, "intermediate_size": case.mlp,
        "moe_intermediate_size": case.mlp, "num_hidden_layers": case.layers, "num_attention_heads": case.heads,
        "num_key_value_heads": case.groups, "head_dim": case.head, "num_experts": case.experts,
        "num_experts_per_tok": 2, "tie_word_embeddings": case.tied,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    images = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": case.hidden,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=images)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
