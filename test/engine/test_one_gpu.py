"""The benchmark for one GPU runs without one, on a tiny model, and all its comparisons hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = {
    "start",
    "first update",
    "warm update",
    "warm update with checksums, verify='sample'",
    "warm update with checksums, verify='full'",
    "compared with a stock load from disk",
    "stock update of whole tensors",
    "update after the weights were released",
    "compared with transformers",
}


@pytest.mark.sweep
def test_every_step_of_a_dense_model_and_of_experts_ends_and_is_right():
    command = [sys.executable, "-m", "benchmark.one_gpu", "--rehearse"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    for case in ("dense", "MoE"):
        assert {row["step"] for row in rows if row["case"] == case and row["right"]} == STEPS
    assert [row["right"] for row in rows if row["case"] == "host cache"] == [True, True]
