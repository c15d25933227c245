"""Drafts of several layers and DFLASH drafts: an update leaves what a start on the checkpoint leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.scripts import run_script
from support.sglangs import ENDS, chosen

pytestmark = [pytest.mark.engine]


@pytest.mark.parametrize("sglang", ENDS)
def test_each_layer_s_model_is_what_a_start_leaves(sglang: str, tmp_path: Path) -> None:
    """SGLang's loaders of files pick the tensors of one layer, and hand them on as the first layer's."""
    for seen in of_ranks("multi_layer_drafts.py", sglang, tmp_path):
        assert seen["refusal"] == ""
        assert seen["updated"] == seen["fresh"]
        assert len({json.dumps(layer) for layer in seen["updated"]}) == 3
        assert seen["unread"] == []


@pytest.mark.parametrize("sglang", ENDS)
def test_a_dflash_draft_and_what_its_worker_keeps_are_what_a_start_leaves(sglang: str, tmp_path: Path) -> None:
    """On GPUs the worker copies the weights of keys and values of all layers to one tensor, outside of the model."""
    for seen in of_ranks("dflash_drafts.py", sglang, tmp_path):
        assert seen["updated"] == seen["fresh"]
        assert seen["kept"] == seen["kept_fresh"]
        assert seen["kept"]
        assert (seen["unread"], seen["moved"]) == ([], [])


def of_ranks(script: str, sglang: str, folder: Path) -> list[dict[str, Any]]:
    with chosen(sglang):
        answers = run_script(Path(__file__).with_name(script), str(folder))
    ranks: list[dict[str, Any]] = sorted(map(json.loads, answers), key=lambda seen: seen["rank"])
    assert [seen["rank"] for seen in ranks] == [0, 1]
    return ranks
