"""Prefill and decode apart: both engines have the new weights after one update, and no answer is of two versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmark.demo.reference import greedy_tokens
from prefill_decode_job import NEW_TOKENS, PROMPTS, UPDATES
from support.nixl_env import needs_nixl
from support.sglangs import chosen
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine, pytest.mark.sweep, needs_nixl]


def test_a_prefill_and_a_decode_engine_are_updated_in_one_update(tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "prefill_decode_job:updates", tmp_path)
    checkpoints = [tmp_path / f"checkpoint-{number}" for number in range(2)]
    stock = stock_digests(tmp_path / "model", checkpoints, tp_size=1, dtype="float32")
    assert seen["live"] == [{"prefill": load[0], "decode": load[0]} for load in stock]
    assert seen["versions"] == {"prefill": "1", "decode": "1"}
    _told_to_pause(seen)


def test_an_answer_of_two_servers_is_of_one_version_of_the_weights(tmp_path: Path) -> None:
    """0.5.12 sends no answer's metadata by NIXL, unless the model has recurrent state or a sliding window."""
    with chosen("newest"):
        (seen,) = run_trainers(1, "prefill_decode_job:serves", tmp_path)
    said = [greedy_tokens(tmp_path / f"checkpoint-{n}", PROMPTS, NEW_TOKENS, "float32")[0] for n in range(2)]
    versions = [[tokens[number] for tokens in said].index(answer) for number, answer in seen["answers"]]
    assert len(versions) > 10 * UPDATES
    assert set(versions) == {0, 1}
    _told_to_pause(seen)


def _told_to_pause(seen: Mapping[str, str]) -> None:
    """Also while requests run, which then go on with their old weights."""
    for mode in ("prefill", "decode"):
        assert f"the {mode} server is not paused" in seen["told"]
