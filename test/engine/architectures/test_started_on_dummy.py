"""Ranks started on dummy weights are, once updated, what stock SGLang makes of the checkpoint: buffers, unread layers.

The reference is a start on the checkpoint by SGLang alone. One on dummy weights would be wrong in the same places.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.patches.sglang_versions import OLDEST
from started_on_dummy import ARCHITECTURES, BIASES, NORMALIZER, SCALARS, SHARES_INDEXERS, TP
from support.scripts import run_script

pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    script = Path(__file__).with_name("started_on_dummy.py")
    lines = run_script(script, str(tmp_path_factory.mktemp("started on dummy")))
    return {(name, rank): seen for name, rank, seen in map(json.loads, lines)}


def of(found: dict[tuple[str, int], dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns what was seen of an architecture on each engine rank. Skips the test if stock SGLang cannot start it."""
    seen = [found[name, rank] for rank in range(TP)]
    if any("stock_cannot" in one for one in seen) and metadata.version("sglang") != str(OLDEST):
        pytest.skip(seen[0]["stock_cannot"])
    return seen


def test_every_defined_tensor_is_that_of_a_rank_started_on_the_checkpoint(
    found: dict[tuple[str, int], dict[str, Any]],
) -> None:
    started = {case: seen for case, seen in found.items() if "stock_cannot" not in seen}
    assert [seen for seen in started.values() if "cannot" in seen] == []
    assert len(found) == TP * len(ARCHITECTURES)
    assert len(started) == len(found) or metadata.version("sglang") != str(OLDEST)
    for (name, _), seen in started.items():
        assert seen["of"] > 50
        # Memory that stock SGLang never writes differs from start to start, where nothing reads it.
        undefined = seen["left_alone"] if name == BIASES else [n for n in seen["left_alone"] if "k_norm" not in n]
        assert set(seen["differing"]) <= set(undefined), name


def test_a_buffer_of_the_checkpoint_is_refused_if_it_is_not_sent(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    for seen in of(found, SCALARS):
        without_buffers, without_files = seen["refused"]
        assert "layers.0.layer_scalar is a buffer that the loader fills" in without_buffers
        assert "model.state_dict()" in without_buffers
        assert without_files == ""


def test_a_buffer_that_no_checkpoint_has_is_asked_of_nobody(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    for seen in of(found, NORMALIZER):
        assert seen["refused"] == ["", ""]
        assert seen["left_alone"] == []


def test_layers_without_an_indexer_of_their_own_are_taken_as_stock_takes_them(
    found: dict[tuple[str, int], dict[str, Any]],
) -> None:
    for seen in of(found, SHARES_INDEXERS):
        assert sorted(seen["left_alone"]) == sorted(seen["unread"])
        if seen["unread"]:  # SGLang 0.5.23 builds none
            assert "indexer.wq_b.weight is not written by the loader" in seen["refused"][1]


def test_half_a_bias_may_be_left_alone(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    for seen in of(found, BIASES):
        assert len(seen["left_alone"]) == 4
        assert "qkv_proj.bias is not written completely" in seen["refused"][1]
