"""The self-test's runs of verl are rehearsed on a host without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.sweep]


def test_rollout_and_trainer_agree_with_each_kind_of_sync() -> None:
    command = [sys.executable, "-m", "sglang_reshard", "selftest", "--verl", "--minutes", "40"]
    ended = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert [row["right"] for row in rows] == [True, None] * 3
    assert all(row["seconds"] > 0 for row in rows if row["right"])
