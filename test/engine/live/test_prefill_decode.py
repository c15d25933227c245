"""Prefill and decode apart: both engines have the new weights after one update, as replicas do."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.stock import stock_digests
from support.nixl_env import needs_nixl
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.sweep, needs_nixl]


def test_a_prefill_and_a_decode_engine_are_updated_in_one_update(tmp_path: Path) -> None:
    (seen,) = run_trainers(1, "prefill_decode_job:updates", tmp_path)
    checkpoints = [tmp_path / f"checkpoint-{number}" for number in range(2)]
    stock = stock_digests(tmp_path / "model", checkpoints, tp_size=1, dtype="float32")
    assert seen["live"] == [{"prefill": load[0], "decode": load[0]} for load in stock]
    assert seen["versions"] == {"prefill": "1", "decode": "1"}
