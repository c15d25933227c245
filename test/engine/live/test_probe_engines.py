"""Live engines say of a few tokens what the trainer's own forward says, until they compute with a stale copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.extras.probe.comparison import compare
from support.sglangs import chosen
from support.sweep import sweep
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]
TOKENS = 31 + 2 + 3  # of probe_job.SEQUENCES, without the first of each


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """FSDP2 over TP=2 on four trainer ranks, in float32, into a TP=2 engine in bfloat16."""
    job, folder = "probe_job:updates_with_probes", tmp_path_factory.mktemp("probe")
    return run_trainers(4, job, folder, source_tp=2, target_tp=2, dtype="bfloat16")


@pytest.fixture(scope="module")
def seen(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


@pytest.mark.parametrize("name", ["first", "with what the old weights cached", "verified", "fresh copies"])
def test_the_engine_says_what_the_trainer_says(seen: dict[str, Any], name: str) -> None:
    probe = seen[name]
    assert probe["skipped"] == ""
    assert probe["tokens"] == TOKENS
    assert 0 < probe["mean_difference"] < 0.03, "bfloat16 of float32 weights"
    assert probe["largest_difference"] < 0.3
    assert probe["seconds"] >= probe["engine_seconds"] > 0


def test_the_numbers_are_of_these_weights_and_no_others(seen: dict[str, Any]) -> None:
    first, second = seen["first"], seen["with what the old weights cached"]
    found, _ = compare(first["sequences"], first["trainer"], [second["trainer"]])
    assert found.mean > 0.1, "one step is seen"
    assert seen["cached"] > 0, "others are served from the cache"


def test_a_paused_engine_is_not_waited_for(seen: dict[str, Any]) -> None:
    assert "generation is paused" in seen["paused"]["skipped"]
    assert seen["paused"]["seconds"] < 30


def test_a_stale_copy_that_no_rule_knows_is_caught_after_a_verified_update(seen: dict[str, Any]) -> None:
    assert seen["kept"] == [4, 4], "layers, on both engine ranks"
    kind, message = seen["stale copies"]
    assert kind == "ProbeMismatch"
    assert "after the update to version '6'" in message
    assert "mean_threshold=0.05" in message
    assert seen["warned"]["mean_difference"] > 0.05
    assert seen["tokens"] != seen["expected tokens"], "it was worth catching"


def test_every_trainer_rank_is_told_the_same(ranks: list[dict[str, Any]], seen: dict[str, Any]) -> None:
    for rank in ranks[1:]:
        assert {**rank, "kept": seen["kept"]} == seen  # the first one has the engine


@pytest.mark.parametrize("end", ["pinned", sweep("newest")])
def test_data_parallel_ranks_are_probed_each(end: str, tmp_path: Path) -> None:
    with chosen(end):
        job = "probe_job:few_updates"
        (seen, _) = run_trainers(2, job, tmp_path, source_tp=1, target_tp=1, dp_size=2, dtype="float32")
    for version in ("1", "2"):
        probe = seen[version]
        assert probe["skipped"] == ""
        assert len(probe["engine"]) == 2
        assert probe["tokens"] == 2 * TOKENS
        assert probe["largest_difference"] < 1e-3
