"""The self-test, run as a user runs it: all its steps are right on this host, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own: the engine has sockets below it, and a socket's path holds 107 characters."""
    with tempfile.TemporaryDirectory(prefix="st-") as made:
        yield Path(made)


def selftest(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Returns what has ended, and its line of JSON."""
    command = [sys.executable, "-m", "sglang_reshard", "selftest", *options]
    ended = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    return ended, json.loads(ended.stdout.splitlines()[-1]) if ended.stdout else {}


def test_each_step_of_a_layout_is_right(folder: Path) -> None:
    ended, said = selftest(folder, "--source", "fsdp=2", "--target", "tp=2", "--routes", "auto,broadcast")
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert said["ok"]
    steps = {row["step"]: row for row in said["rows"]}
    assert {step for step, row in steps.items() if row["right"]} >= {
        "first update",
        "every tensor, as SGLang's own load leaves it",
        "log-probabilities, as transformers has them",
        "warm update, auto",
        "warm update, broadcast",
        "warm update, verify='sample'",
        "warm update, verify='full'",
        "staged update, verify='full'",
        "prefix cache, flush_cache='by_version'",
        "prefix cache, flush_cache=False",
        "a trainer rank is killed in the middle of an update",
        "after that, new trainer ranks update the same server",
        "an engine rank is killed in the middle of an update",
    }
    assert [step for step, row in steps.items() if row["right"] is False] == []
    assert steps["warm update, auto"]["route"] == "ipc"
    assert steps["every tensor, as SGLang's own load leaves it"]["more"]["tensors"] > 0
    assert steps["warm update, auto"]["limit"] > 0 < steps["warm update, auto"]["stock"]
    assert list(folder.iterdir()) == []  # checkpoints, digests and logs are gone


@pytest.mark.sweep
def test_every_run_of_a_host_without_a_gpu_is_right(folder: Path) -> None:
    ended, said = selftest(folder, "--minutes", "60")
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert len({row["run"] for row in said["rows"]}) == 5
    assert list(folder.iterdir()) == []


def test_too_many_ranks_for_the_memory_are_refused_before_anything_starts(folder: Path) -> None:
    ended, said = selftest(folder, "--target", "tp=1024")
    assert (ended.returncode, said) == (2, {})
    assert "--target tp=" in ended.stderr
    assert list(folder.iterdir()) == []
