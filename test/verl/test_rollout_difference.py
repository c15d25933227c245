"""How far rollout and actor are apart in verl: in nats, and by the version of the rollout's weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils.debug import metrics as stock

from sglang_reshard.verl import rollout_difference
from sglang_reshard.verl.rollout_difference import _calculate, _compute_old_log_prob, difference_metrics

ROLLOUT = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -1.0, -1.0], [-2.0, -2.0, -2.0]])
ACTOR = torch.tensor([[-1.5, -2.0, -9.0], [-3.0, -1.0, -1.25], [-4.0, -2.0, -2.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
ALL = {"reshard/logprob_diff_mean": 2.75 / 8, "reshard/logprob_diff_max": 2.0}
NEWEST = {
    "reshard/logprob_diff_mean": 0.75 / 5,
    "reshard/logprob_diff_max": 0.5,
    "reshard/logprob_diff_max_version": 4.0,
    "reshard/logprob_diff_mean_older": 2.0 / 3,
}


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([None] * 3, ALL),
        ([(4, 4)] * 3, {**ALL, "reshard/logprob_diff_max_version": 4.0}),
        ([(4, 4), (4, 4), (3, 3)], NEWEST),
        ([(4, 4), (4, 4), (3, 4)], NEWEST),
        ([(4, 4), (4, 4), None], NEWEST),
        ([(3, 4)] * 3, {"reshard/logprob_diff_mean_older": 2.75 / 8}),
    ],
)
def test_samples_of_the_newest_version_are_told_from_others(versions: Any, expected: dict[str, float]) -> None:
    assert difference_metrics(ROLLOUT, ACTOR, MASK, versions) == pytest.approx(expected)


def test_without_sampled_tokens_there_is_nothing_to_say() -> None:
    assert difference_metrics(ROLLOUT, ACTOR, torch.zeros_like(MASK), [None] * 3) == {}


def batch(mask: torch.Tensor = MASK, **columns: list[int]) -> Any:
    tensors = {"rollout_log_probs": ROLLOUT, "old_log_probs": ACTOR, "response_mask": mask, "responses": MASK}
    return SimpleNamespace(batch=tensors, non_tensor_batch={name: np.array(c) for name, c in columns.items()})


def test_versions_are_those_of_the_batch() -> None:
    data = batch(min_global_steps=[4, 4, 3], max_global_steps=[4, 4, 3])
    found = _calculate(stock.calculate_debug_metrics, data)
    assert {name: found[name] for name in NEWEST} == pytest.approx(NEWEST)
    assert found["training/rollout_probs_diff_valid"] == 1, "verl's own stay"


def test_versions_are_those_of_the_tags_while_the_v1_trainer_works_on_it() -> None:
    steps = [{"min_global_steps": v, "max_global_steps": v} for v in (4, 4, 3)]

    def compute(_trainer: Any, _batch: Any, metrics: dict[str, float]) -> None:
        metrics.update(_calculate(stock.calculate_debug_metrics, batch()))

    found: dict[str, float] = {}
    _compute_old_log_prob(compute, None, SimpleNamespace(tags=steps), found)
    assert {name: found[name] for name in NEWEST} == pytest.approx(NEWEST)
    assert "reshard/logprob_diff_max_version" not in _calculate(stock.calculate_debug_metrics, batch())


def test_what_verl_could_not_compare_is_left_alone() -> None:
    found = _calculate(stock.calculate_debug_metrics, batch(torch.zeros_like(MASK)))
    assert found["training/rollout_probs_diff_valid"] == 0
    assert not any(name.startswith("reshard/") for name in found)


def test_the_trainer_s_own_name_of_the_function_is_hooked() -> None:
    from verl.trainer.ppo.v1 import trainer_base

    rollout_difference.install()
    for module in (trainer_base, stock):
        assert "reshard/logprob_diff_mean" in module.calculate_debug_metrics(batch())
