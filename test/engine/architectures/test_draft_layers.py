"""Targets and their drafts, traced together: bit for bit what stock loading of both leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.scripts import run_script

pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    script = Path(__file__).with_name("draft_layers.py")
    answers = run_script(script, str(tmp_path_factory.mktemp("draft layers")))
    return [json.loads(line) for line in answers]


def test_target_and_draft_are_what_stock_loading_leaves(found: list[list[Any]]) -> None:
    outcomes = {(name, rank): finding for name, rank, without, finding in found if not without}
    assert len(outcomes) == 10
    assert {key: of["outcome"] for key, of in outcomes.items()} == dict.fromkeys(outcomes, "passed"), outcomes
    eagles = {key: of for key, of in outcomes.items() if "Eagle" in key[0]}
    assert len(eagles) == 6
    assert all(of["copies"] > (30 if key in eagles else 100) for key, of in outcomes.items())


def test_a_draft_that_some_tensors_are_missing_for_is_refused(found: list[list[Any]]) -> None:
    (refused,) = [finding for *_, without, finding in found if without == "eh_proj"]
    assert refused["outcome"] == "refused"
    assert "draft_models.0.model.eh_proj.weight" in refused["why"]
