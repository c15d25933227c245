"""An engine of the newest SGLang that the patches work with: what the others of these tests show of the pinned one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.patches.sglang_versions import NEWEST
from support.checkpoints import write_checkpoint
from support.sglangs import chosen
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
REASON = "engine rank 1 has half of update 7"  # newest_job's


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three trainer ranks with FSDP2, to TP=2, in float32, where tokens are decided by the weights alone."""
    with chosen("newest"):
        return run_trainers(
            3,
            "newest_job:updates_and_mistakes",
            tmp_path_factory.mktemp("newest"),
            source_tp=1,
            target_tp=2,
            dtype="float32",
            bucket_bytes=1 << 20,
            transport="p2p",
        )


@pytest.fixture(scope="module")
def seen(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


def test_it_is_the_newest(seen: dict[str, Any]) -> None:
    assert seen["version"] == str(NEWEST)


@pytest.mark.parametrize("version", ["1", "2"])
def test_its_weights_are_those_of_its_own_load_of_a_checkpoint(seen: dict[str, Any], version: str) -> None:
    assert len(seen["ours"][version]) == 2
    assert len(seen["ours"][version][0]) > 10
    assert seen["ours"][version] == seen["stock"][version]


def test_it_says_what_transformers_says(seen: dict[str, Any]) -> None:
    assert seen["tokens"]["1"] == seen["expected"]["1"]
    assert seen["tokens"]["2"] == seen["expected"]["2"]
    assert seen["tokens"]["1"] != seen["tokens"]["2"]


def test_its_answers_carry_the_version(seen: dict[str, Any]) -> None:
    assert seen["said"] == "2"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [("same version", "already version '2'"), ("in a session", "call end_weight_update")],
)
def test_a_mistake_is_refused_by_name(ranks: list[dict[str, Any]], mistake: str, says: str) -> None:
    for rank in ranks:
        kind, message = rank[mistake]
        assert kind == "EngineRefused"
        assert says in message


def test_versions_of_the_cache_are_kept_apart(seen: dict[str, Any]) -> None:
    first, second, of_new_weights, again = seen["cached"]
    assert (first, of_new_weights) == (0, 0)
    assert second > 0
    assert again > 0


def test_torn_weights_serve_nobody_until_an_update_succeeds(seen: dict[str, Any]) -> None:
    assert seen["while torn"] == ["TornWeights", REASON]
    assert seen["tokens"]["healed"] == seen["tokens"]["2"]


def test_it_leaves_no_shared_memory(seen: dict[str, Any]) -> None:
    assert any(name.startswith("sglang_loads_") for name in seen["segments"]["had"])
    assert seen["segments"]["left"] == []


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"pp_size": 2}], ids=str)
def test_data_parallel_and_pipelined_ones_follow_as_well(sizes: dict[str, int], tmp_path: Path) -> None:
    for version in ("1", "2"):
        write_checkpoint("Qwen3ForCausalLM", tmp_path / version, seed=int(version))
    engine = {"dtype": "float32", "tp_size": 1, **sizes}
    with chosen("newest"):
        job = "models_job:two_updates"
        seen = run_trainers(2, job, tmp_path, engine=engine, generates=True, transformers=True)[0]
    first, second, by_stock = seen["digests"]
    assert len(first) == 2
    assert first == by_stock != second
    assert seen["tokens"][1:3] == seen["reference"]
