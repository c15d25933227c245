"""A live engine whose EAGLE draft proposes only some tokens: its head has these rows of the target's new head.

SGLang copies these rows at the start (`speculative_token_map`). Without a GPU no draft generates, so weights are
compared: those of an updated engine with those of one that SGLang starts, without the plugin, on the same checkpoint.
The newest SGLang starts no draft without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.checkpoints import write_checkpoint
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.sweep]
DRAFT = "LlamaForCausalLMEagle"
TOKENS = [1, 5, 9, 30, 44, 60, 100, 101]


def test_the_draft_s_head_is_of_the_target_s_new_one(tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_checkpoint("LlamaForCausalLM", tmp_path / version, architecture=DRAFT, seed=10 * int(version))
    torch.save(TOKENS, tmp_path / "tokens.pt")
    job = {"tokens": str(tmp_path / "tokens.pt")}
    interpreted = {"TRITON_INTERPRET": "1"}
    (tmp_path / "stock").mkdir()
    (seen,) = run_trainers(1, "hot_tokens_job:updates", tmp_path, environment=interpreted, **job)
    (fresh,) = run_trainers(
        1,
        "hot_tokens_job:start",
        tmp_path / "stock",
        environment={**interpreted, "SGLANG_PLUGINS": "somebody-elses"},
        checkpoint=str(tmp_path / "2"),
        **job,
    )
    assert seen["refusal"][0] == "EngineRefused"
    assert seen["refused"] == seen["start"]
    assert seen["staged"] == fresh
    for before in ("start", "updated"):
        assert seen[before][0]["lm_head.weight"] != fresh[0]["lm_head.weight"]
    assert seen["updated"][0].keys() == fresh[0].keys()
