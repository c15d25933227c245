"""PEFT's options and states, served by one live engine: its log-probabilities are PEFT's own, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.sglangs import chosen
from support.sweep import sweep
from support.trainers import run_trainers
from trainers.lora_variants_job import REFUSED, SERVED

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("forks")]
CLOSE = 1e-4


@pytest.fixture(scope="module", params=["pinned", sweep("newest")])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with chosen(request.param):
        (found,) = run_trainers(1, "trainers.lora_variants_job:variants", tmp_path_factory.mktemp("lora"))
    return found


@pytest.mark.parametrize("name", SERVED)
def test_what_is_plain_lora_is_served(seen: dict[str, Any], name: str) -> None:
    assert seen["served"][name] < CLOSE


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_refused_and_the_engine_serves_on(seen: dict[str, Any], name: str) -> None:
    said = {"KaSA": "Unsupported: kasa_config=", "BD-LoRA": "Unsupported: use_bdlora="}
    assert said.get(name, "SGLang cannot load the LoRA adapter") in seen["refused"][name]
    assert seen["after"] < CLOSE


def test_an_adapter_that_is_merged_is_not_served_on_top(seen: dict[str, Any]) -> None:
    assert seen["merged"] < CLOSE
    for name in ("over merged", "merged over", "said so"):
        assert "the LoRA adapters default are merged into the weights" in seen[name]


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_changed_base_is_sent_in_one_call(seen: dict[str, Any], init: str) -> None:
    assert f"init_lora_weights='{init}' has changed the base weights" in seen[init]
    assert seen[f"{init}, with its base"] < CLOSE


def test_a_whole_peft_model_is_refused_with_what_to_do(seen: dict[str, Any]) -> None:
    assert "sender.lora_adapter(name, adapter_config(model))" in seen["whole"]
