"""What SGLang does by itself stays what it was: its own updates, pauses, and a cache without old tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stock_steps import did_what_they_say, digest_of
from support.live_engines import WITHOUT_PLUGIN
from support.sglangs import chosen
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine]
JOB = {"source_tp": 2, "target_tp": 2, "dtype": "float32", "bucket_bytes": 1 << 20, "transport": "broadcast"}
IN_FLIGHT = 150  # stock_job's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """An engine with the package."""
    return run_trainers(2, "stock_job:around_our_updates", folder, **JOB)[0]


@pytest.fixture(scope="module")
def plain(folder: Path, seen: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An engine without its plugin, given the same checkpoints."""
    (plain,) = run_trainers(
        1,
        "stock_job:without_the_plugin",
        tmp_path_factory.mktemp("plain"),
        environment=WITHOUT_PLUGIN,
        weights=str(folder),
        plugin=False,
        **JOB,
    )
    return plain


def test_stock_updates_and_ours_end_in_the_same_bits(folder: Path, seen: dict[str, Any]) -> None:
    """And in those of a stock load, so that equal digests cannot come from updates that did nothing."""
    loads = stock_digests(folder / "model", [folder / f"checkpoint-{v}" for v in "12"], tp_size=2, dtype="float32")
    first, second = ([load[rank] for rank in range(2)] for load in loads)
    assert first != second
    assert [seen["steps"][f"disk: weights {v}"]["weights"] for v in "12"] == [digest_of(first), digest_of(second)]
    assert seen["ours before"] == seen["ours after"] == second


def test_each_step_of_stock_updates_ends_alike_with_the_package_and_without(
    seen: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert len(plain) >= 81
    assert_alike(seen["steps"], plain)


def assert_alike(steps: dict[str, Any], plain: dict[str, Any]) -> None:
    """Asserts that all outcomes are equal, and that they are what the steps say: that neither has done nothing."""
    assert list(steps) == list(plain)
    for name, outcome in steps.items():
        assert outcome == plain[name], name
    said = did_what_they_say(plain)
    assert said == {name: True for name in said}


@pytest.mark.sweep
@pytest.mark.parametrize(("writer", "version"), [("LlamaForCausalLM", "pinned"), ("Qwen3ForCausalLM", "newest")])
def test_each_step_ends_alike_in_other_models_and_versions(tmp_path: Path, writer: str, version: str) -> None:
    """Of Llama SGLang reads weights by name; the newest takes tensors in sessions."""
    outcomes = []
    for plugin in (True, False):
        folder = tmp_path / str(plugin)
        folder.mkdir()
        environment = {} if plugin else WITHOUT_PLUGIN
        with chosen(version):
            (steps,) = run_trainers(
                1,
                "stock_job:steps_of_a_model",
                folder,
                environment=environment,
                writer=writer,
                target_tp=2,
                dtype="float32",
                plugin=plugin,
            )
        outcomes.append(steps)
    assert_alike(*outcomes)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_after_a_pause_the_engine_says_what_the_new_weights_say(seen: dict[str, Any], mode: str) -> None:
    if mode != "in_place":  # there the cache was kept on purpose
        assert seen["pauses"][mode]["after"] == seen["expected"]["2"]
    assert 0 < seen["pauses"][mode]["had"] < IN_FLIGHT


def test_an_aborted_request_ends_with_what_it_had(seen: dict[str, Any]) -> None:
    aborted = seen["pauses"]["abort"]
    assert aborted["reason"] == "abort"
    assert len(aborted["tokens"]) < IN_FLIGHT


def test_a_retracted_request_goes_on_with_the_new_weights_alone(seen: dict[str, Any]) -> None:
    """Its tokens stand, all that was computed from them is computed again: as transformers would go on."""
    retracted = seen["pauses"]["retract"]
    assert retracted["reason"] == "length"
    assert retracted["tokens"] == seen["retracted"]


def test_a_request_paused_in_place_keeps_its_cache_if_the_trainer_says_so(seen: dict[str, Any]) -> None:
    in_place = seen["pauses"]["in_place"]
    kind, message = in_place["refusal"]
    assert kind == "EngineRefused"
    assert "1 requests are running" in message
    assert "flush_cache='by_version'" in message
    assert len(in_place["tokens"]) == IN_FLIGHT


def test_no_token_of_the_old_weights_is_served_from_the_cache(seen: dict[str, Any]) -> None:
    cache, long = seen["cache"], seen["long"]
    assert long["1"] != long["2"]
    assert cache["cold"] == [0, long["1"]]
    assert cache["warm"][0] > 0
    assert cache["warm"][1] == long["1"]
    assert cache["after"] == [0, long["2"]]
    # What the line above would have caught.
    assert cache["without a flush"][0] > 0
    assert cache["without a flush"][1] != long["1"]


def test_versions_of_the_cache_are_kept_apart(seen: dict[str, Any]) -> None:
    cache, long = seen["cache"], seen["long"]
    cold, warm = cache["by version"]
    assert cold == [0, long["2"]], "it starts with what an update without a flush left"
    assert warm[0] > 0
    assert warm[1] == long["2"]
    had, flown, cold, warm = cache["beside one in place"]
    assert 0 < had < IN_FLIGHT
    assert len(flown["tokens"]) == IN_FLIGHT, "it goes on with the cache that it holds"
    assert cold == [0, long["1"]]
    assert warm[0] > 0
    assert warm[1] == long["1"]
