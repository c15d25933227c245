"""A live engine that quantizes what it has loaded: updated, it has what an engine has that starts on the weights.

It starts on a snapshot of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainers import run_trainers

pytestmark = [pytest.mark.engine]


def test_an_engine_that_quantizes_to_fp8_has_what_a_start_on_the_weights_leaves(tmp_path: Path) -> None:
    engine = {"quantization": "fp8"}
    (seen,) = run_trainers(1, "repacking_job:updates", tmp_path, engine=engine, cold=[2])
    first, staged, last = seen["live"]
    assert [last] == seen["cold"]
    weights = "model.layers.0.self_attn.qkv_proj.weight"
    assert len({found[0][weights] for found in (first, staged, last)}) == 3, "each update brought other weights"
