"""A plan says which of a model's sizes an engine's parallel sizes do not divide, and where SGLang failed."""

from __future__ import annotations

import json

import pytest

from sglang_reshard.cli.layouts import StagedTarget, parsed
from sglang_reshard.cli.plan.checkpoint import prepare
from sglang_reshard.cli.plan.request import check_stages, indivisible, start_failure
from sglang_reshard.errors import Mismatch

SIZES = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
}


def engine(text: str) -> StagedTarget:
    return parsed(text, StagedTarget, "--target")


@pytest.mark.parametrize("target", ["tp=1", "tp=2", "tp=8,ep=8", "tp=16", "tp=32,dp=4,ep=2"])
def test_sizes_that_fit_are_not_named(target: str) -> None:
    assert list(indivisible(SIZES, engine(target))) == []


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("tp=64", ["num_attention_heads=32, which is not divisible by tp=64"]),
        ("tp=64,dp=2", []),
        ("tp=12", ["num_attention_heads", "num_key_value_heads", "vocab_size=151936, padded to 151936"]),
        ("tp=3", ["num_attention_heads", "num_key_value_heads", "vocab_size"]),
        (
            "tp=256,ep=256,dp=16",
            ["vocab_size", "intermediate_size", "num_experts=128, which is not divisible by ep=256"],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(target: str, named: list[str]) -> None:
    sizes = SIZES | ({"intermediate_size": 12200} if "256" in target else {})
    found = list(indivisible({"text_config": sizes}, engine(target)))
    assert len(found) == len(named)
    assert all(text.startswith(start) for text, start in zip(found, named, strict=True))


def test_an_assertion_without_a_message_is_told_with_its_statement() -> None:
    config = SIZES
    try:
        assert config["num_attention_heads"] % 64 == 0
    except AssertionError as error:
        error.args = ()  # pytest gives it one
        told = start_failure(error, config, engine("tp=64"), "m")
    assert 'assert config["num_attention_heads"] % 64 == 0` at `test_plan_sizes.py:' in told
    assert "; m has num_attention_heads=32, which is not divisible by tp=64" in told


def test_other_errors_are_told_as_they_are() -> None:
    assert start_failure(KeyError("q"), SIZES, engine("tp=64"), "m") == "KeyError: 'q'"


def test_every_stage_needs_a_layer(tmp_path) -> None:
    config = json.loads((prepare("qwen3-8b", 4, tmp_path) / "config.json").read_text())
    check_stages(config, engine("tp=2,pp=4"), "qwen3-8b")
    with pytest.raises(Mismatch, match="qwen3-8b has 4 layers, and pp=5 needs a layer for each pipeline stage"):
        check_stages(config, engine("tp=2,pp=5"), "qwen3-8b")
