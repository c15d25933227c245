"""Engines whose weights are not only what the loader writes: each refuses by name, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def refused(folder: Path, environment: dict[str, str] | None = None, **job: Any) -> tuple[str, list[str]]:
    """What the engine says, twice the same, with its weights untouched; and what a check at its start says."""
    job = {"dtype": "float32", **job}
    (seen,) = run_trainers(1, "odd_engines_job:update_in_vain", folder, environment=environment, **job)
    (kind, message), again, at_start = seen["told"]
    assert kind == "EngineRefused"
    assert again == [kind, message]
    assert seen["before"] == seen["after"]
    assert len(seen["before"][0]) > 20
    assert seen["version"] != "1"
    return message, at_start


def test_weights_that_were_quantized_after_loading_are_not_plain_copies(tmp_path: Path) -> None:
    message, _ = refused(tmp_path, dtype="bfloat16", engine={"quantization": "fp8"})
    assert "engine rank 0" in message
    assert "model.layers.0.self_attn" in message
    assert "without quantization=" in message
