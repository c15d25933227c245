"""The demo, run as a user runs it: what it prints last is a proof, and its numbers keep the bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmark.demo import memory
from benchmark.demo.verdict import SLACK_BYTES
from support.sweep import sweep

BUCKET_MIB = 1

pytestmark = pytest.mark.engine


def run_demo(folder: Path, source_tp: int, target_tp: int, dtype: str, *transports: str) -> tuple[dict[str, Any], str]:
    """(the line of JSON, standard error)."""
    if complaint := memory.complaint(source_tp, target_tp, memory.available_bytes()):
        pytest.skip(complaint)
    environment = {
        **os.environ,
        "SOURCE_TP": str(source_tp),
        "TARGET_TP": str(target_tp),
        "DTYPE": dtype,
        "TRANSPORTS": ",".join(transports),
        "BUCKET_MIB": str(BUCKET_MIB),
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "sglang_reshard.cli.main", "demo"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def assert_proved(line: dict[str, Any], dtypes: list[str]) -> None:
    assert line["ok"]
    assert line["tokens_equal"]
    assert line["bit_exact"]
    assert [u["dtype"] for u in line["updates"]] == [dtype for dtype in dtypes for _ in range(2)]
    for update in line["updates"]:
        assert update["tensors_compared"] > 0
        assert not update["tokens_equal_before"]
        first = update["engine_ranks"][0]
        assert first["received_bytes"] <= update["trainer_ranks"][0]["shard_bytes"]
        for rank in update["engine_ranks"]:
            assert rank["peak_extra_bytes"] <= 2 * BUCKET_MIB * 1024 * 1024 + SLACK_BYTES
            assert rank["received_bytes"] >= rank["least_bytes"] > 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own: the engine has sockets below it, and a socket's path holds 107 characters."""
    with tempfile.TemporaryDirectory(prefix="demo-") as made:
        yield Path(made)


@pytest.mark.sweep
def test_two_to_four_in_both_precisions(folder: Path) -> None:
    line, progress = run_demo(folder, 2, 4, "both", "auto", "auto")
    assert_proved(line, ["float32", "bfloat16"])
    assert "start the engine: TP=4, float32" in progress
    assert list(folder.iterdir()) == []  # checkpoints, digests and the log are gone


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 4), sweep(4, 16)])
def test_by_what_is_chosen_and_by_broadcast(source_tp: int, target_tp: int, folder: Path) -> None:
    """By what is chosen on one host, and by broadcast of each trainer rank's shard to the engine ranks that need it."""
    line, progress = run_demo(folder, source_tp, target_tp, "float32", "auto", "broadcast")
    assert_proved(line, ["float32"])
    by_ipc, by_broadcast = line["updates"]
    assert (by_ipc["transport"], by_broadcast["transport"]) == ("ipc", "broadcast")
    for rank in by_ipc["engine_ranks"]:
        assert rank["received_bytes"] == rank["least_bytes"]
    for update in (by_ipc, by_broadcast):
        assert len(update["engine_ranks"]) == target_tp
    # Whole shards arrive, of one trainer rank or, for engine ranks at a shard's edge, of two; never the whole model.
    shards = [rank["shard_bytes"] for rank in by_broadcast["trainer_ranks"]]
    for rank in by_broadcast["engine_ranks"]:
        assert rank["least_bytes"] < rank["received_bytes"] < 2 * max(shards)
    assert f"start the engine: TP={target_tp}, float32" in progress
    assert list(folder.iterdir()) == []  # checkpoints, digests and the log are gone


def test_too_many_ranks_for_the_memory_are_refused_before_anything_starts(folder: Path) -> None:
    ranks = 1 + psutil.virtual_memory().total // memory.ENGINE_RANK_BYTES
    environment = {**os.environ, "TARGET_TP": str(ranks), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "sglang_reshard.cli.main", "demo"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "These fit: SOURCE_TP=" in done.stderr or "No sizes fit" in done.stderr
    assert done.stdout == ""
    assert list(folder.iterdir()) == []
