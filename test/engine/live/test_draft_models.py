"""A live engine with a draft model: it follows with its target, by the same tensors or its own, or stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine]


def unknown(versions: dict[str, list[str]]) -> str:
    (version,) = versions
    assert version.startswith("unknown since an update by SGLang")
    return version


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
    of_draft, again, of_none, of_target = seen["left"]
    assert of_draft == again == {unknown(of_draft): ["draft.*"]}, "the oracle looks through an update of SGLang's own"
    assert of_none == {}
    assert of_target == {unknown(of_target): seen["kept"]} == seen["live"]
    assert unknown(of_draft) != unknown(of_target)
    same, again, after_a_load = seen["digests"]
    assert same == again != after_a_load, "SGLang may have written the target"
    assert not any(name.startswith("draft") for name in seen["kept"])
