"""A live engine with a draft model: it follows with its target, by the same tensors or its own, or stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.stock import stock_digests
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]


def test_drafts_follow_in_the_same_update_or_stay(tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "draft_job:updates", tmp_path, environment={"TRITON_INTERPRET": "1"})
    checkpoints = [tmp_path / f"checkpoint-{number}" for number in range(2)]
    loads = stock_digests(tmp_path / "model", checkpoints, tp_size=1, dtype="float32")
    first, second = ({n: load[0][n] for n in load[0] if n.endswith(("weight", "bias"))} for load in loads)

    def weights(name: str) -> list[dict[str, str]]:
        return [{n: found[n] for n in first} for found in seen[name]]

    draft_before, target_before = weights("before")
    assert target_before not in (first, second)
    assert weights("target alone") == [draft_before, first]
    assert weights("each its own") == [second, first]
    assert seen["same"][0] == "EngineRefused"
    assert "draft_models.0." in seen["same"][1]
    assert seen["refused"] == seen["each its own"]
    assert weights("both") == [second, second]
    assert weights("draft alone") == [first, second]
    assert seen["left"] == [{"default": ["draft.*"]}, {"default": ["draft.*"]}, {}, {"3": seen["kept"]}]
    assert seen["live"] == seen["left"][-1]
    same, again, after_a_load = seen["digests"]
    assert same == again != after_a_load, "SGLang's load gave the target another version"
    assert not any(name.startswith("draft") for name in seen["kept"])
