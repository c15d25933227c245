"""Engines of other models, kinds of parallelism and options of SGLang: two updates leave what a start leaves.

The engine that starts on the checkpoint has the same options, and is SGLang without the plugin. Some of these engines
generate only on GPUs, with stock SGLang alone, too; of them every live tensor of every rank is compared. With expert
parallelism SGLang's CPU kernel takes experts of other ranks for an index out of range, and with dp-attention its CPU
attention lacks what a batch without requests asks of it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoints import write_checkpoint
from support.sglangs import chosen
from test_fresh_engines import assert_is_fresh, seen, step

pytestmark = [pytest.mark.engine]
BOTH = ("pinned", "newest")
TP, EP, DP = {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
IN_CHUNKS = {"chunked_prefill_size": 4, "enable_mixed_chunk": True, "page_size": 4, "attention_backend": "triton"}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 1, "lora_backend": "torch_native"}
WRAPPED = {**LORA, "lora_target_modules": ["q_proj", "o_proj", "embed_tokens", "lm_head"]}
TRAINERS = {"DeepseekV3ForCausalLM": 3}  # else two: tensor parallel, with uneven shards
# SGLang's CPU attention takes a prefill's latent cache for heads, and runs only where both are equally wide. What it
# says then is not what the model should say, and depends on the weights all the same.
INSTEAD = {"DeepseekV3ForCausalLM": {"kv_lora_rank": 32, "qk_nope_head_dim": 32}}
Row = tuple[str, dict[str, Any], tuple[str, ...]]
GENERATE: list[Row] = [
    ("DeepseekV3ForCausalLM", TP, ("pinned",)),
    ("Qwen3ForCausalLM", {"dp_size": 2}, BOTH),
    ("Qwen3ForCausalLM", {"pp_size": 2}, BOTH),
    ("Qwen3MoeForCausalLM", TP, ("pinned",)),
    ("Qwen3MoeForCausalLM", {"dp_size": 2, **TP}, ("pinned",)),
    ("Qwen3MoeForCausalLM", {"pp_size": 2, **TP}, ("pinned",)),
    ("Qwen3ForCausalLM", {"enable_fp32_lm_head": True}, BOTH),
    ("Qwen3ForCausalLM", {"kv_cache_dtype": "fp8_e5m2"}, ("pinned",)),
    ("Qwen3ForCausalLM", {"model_impl": "transformers"}, ("pinned",)),
    ("Qwen3ForCausalLM", {"model_impl": "transformers", **TP}, BOTH),
    ("Qwen3ForCausalLM", {"disable_overlap_schedule": False}, ("pinned",)),
    ("Qwen3ForCausalLM", {"enable_streaming_session": True}, ("pinned",)),
    ("Qwen3ForCausalLM", IN_CHUNKS, ("pinned",)),
    ("Qwen3ForCausalLM", {**WRAPPED, **TP}, ("pinned",)),
    ("Glm4MoeForCausalLM", {"disable_shared_experts_fusion": True, **TP}, ("pinned",)),
]
WEIGHTS: list[Row] = [
    ("Qwen3MoeForCausalLM", EP | DP, ("pinned",)),
    ("Qwen3MoeForCausalLM", EP, ("pinned",)),
    ("Qwen3MoeForCausalLM", {"tp_size": 4, "ep_size": 2}, ("pinned",)),
    ("Qwen3ForCausalLM", DP, ("pinned",)),
    ("DeepseekV3ForCausalLM", {**DP, "tp_size": 4, "ep_size": 2}, ("pinned",)),
    ("Qwen3ForCausalLM", {"enable_dp_lm_head": True, **DP}, BOTH),
    ("Glm4MoeForCausalLM", {"moe_dense_tp_size": 1, **DP}, BOTH),
    ("Qwen3MoeForCausalLM", {"ep_num_redundant_experts": 2, **EP}, BOTH),
    ("Qwen3MoeForCausalLM", {"init_expert_location": "permuted", **EP}, ("pinned",)),
    ("Qwen3VLForConditionalGeneration", {"mm_enable_dp_encoder": True, **TP}, ("pinned",)),
]


FEW = (GENERATE[0], WEIGHTS[0])


def cases(rows: list[Row]) -> list[Any]:
    return [
        pytest.param(*row[:2], sglang, id=f"{sglang}-{row[0]}-{row[1]}", marks=() if row in FEW else pytest.mark.sweep)
        for row in rows
        for sglang in row[2]
    ]


@pytest.mark.parametrize(("writer", "server", "sglang"), cases(GENERATE))
def test_it_says_what_a_fresh_engine_says(writer: str, server: dict[str, Any], sglang: str, tmp_path: Path) -> None:
    dummy, first, second, fresh = updated_and_fresh(writer, server, sglang, tmp_path)
    assert_is_fresh(second, fresh, dummy, first)


@pytest.mark.parametrize(("writer", "server", "sglang"), cases(WEIGHTS))
def test_it_has_the_weights_of_a_fresh_engine(writer: str, server: dict[str, Any], sglang: str, tmp_path: Path) -> None:
    _, first, second, fresh = updated_and_fresh(writer, server, sglang, tmp_path, generates=False)
    assert second["digests"] == fresh["digests"] != first["digests"]


def updated_and_fresh(
    writer: str, server: dict[str, Any], sglang: str, folder: Path, **options: Any
) -> list[dict[str, Any]]:
    for version in ("1", "2"):
        if writer == "Qwen3VLForConditionalGeneration":
            from support.tiny_qwen3_vl import write_qwen3_vl

            write_qwen3_vl(folder / version, int(version), torch.bfloat16)
        else:
            write_checkpoint(writer, folder / version, seed=int(version), instead=INSTEAD.get(writer, {}))
    if "init_expert_location" in server:
        server = server | {"init_expert_location": str(write_placement(folder))}
    with chosen(sglang), pytest.MonkeyPatch.context() as patch:
        if server.get("attention_backend") == "triton":
            patch.setenv("TRITON_INTERPRET", "1")
        steps = [step("1"), step("2", staged="pp_size" not in server)]
        return seen(folder, steps, folder / "2", trainers=TRAINERS.get(writer, 2), **options, **server)


def write_placement(folder: Path) -> Path:
    """A random order of the experts of each layer."""
    config = json.loads((folder / "1" / "config.json").read_text())
    experts, layers = config["num_local_experts"], config["num_hidden_layers"]
    drawn = random.Random(1)
    placement = [drawn.sample(range(experts), experts) for _ in range(layers)]
    file = folder / "placement.json"
    file.write_text(json.dumps({"physical_to_logical_map": placement}))
    return file
