"""Under conversations and updates, nobody reads the cache of another version."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import results
from benchmark.cache_versions import CLIENTS

ROOT = Path(__file__).parents[2]


@pytest.mark.engine
@pytest.mark.sweep
def test_requests_go_on_with_their_cache_and_nobody_reads_an_old_one(tmp_path):
    out = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "benchmark.cache_versions",
        "--seconds",
        "9",
        "--every-s",
        "1.5",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["way"]: row for row in results.load(out)[1]}
    # A busy host computes few turns in these seconds: one of each client, whose end the benchmark awaits, is certain.
    assert all(row["updates"] > 2 and row["turns"] >= CLIENTS for row in rows.values())
    assert [row["cold"] for row in rows.values()] == [True, True, True, False]
