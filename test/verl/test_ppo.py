"""`python -m verl.trainer.main_ppo`, engines on the trainer's own devices and on others: every update arrives.

What tells is how well the trainer and the engine agree on the probabilities of the tokens that the engine
chose: they agree while both have the same weights. Where an update is lost on purpose, they no longer do.
"""

from __future__ import annotations

import pytest

from support.verl_host import LARGE_STEPS, run_ppo, verl_folder

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("forks")]
# Answers to a prompt that all have the same reward teach nothing, and of two that is not rare.
FOUR_ANSWERS = "actor_rollout_ref.rollout.n=4"
LOSE_ONE = "actor_rollout_ref.model.external_lib=drop_sync"
APART = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    # Else it samples ahead, from older weights.
    "trainer.v1.separate_async.num_warmup_batches=0",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=4",
    "ray_kwargs.ray_init.num_cpus=40",
]


def test_together_every_update_arrives_until_one_is_lost() -> None:
    with verl_folder() as folder:
        run = run_ppo(folder, LARGE_STEPS, FOUR_ANSWERS, LOSE_ONE, steps=3)
    first, second, after_the_lost_one = run.correlations
    assert min(first, second) > 0.99
    assert "the update after step 2 is lost" in run.log
    assert after_the_lost_one < 0.9
    assert run.steps[0]["reshard/bytes_per_rank"] > 0
    assert not any("reshard/seconds/plan" in step for step in run.steps), "the sync before step 1 has planned"
    means = [step["reshard/logprob_diff_mean"] for step in run.steps]
    assert max(means[:2]) < 0.05 < means[2]
    assert all(step["reshard/logprob_diff_max"] >= mean for step, mean in zip(run.steps, means, strict=True))
    assert [step["reshard/logprob_diff_max_version"] for step in run.steps[:2]] == [0, 1]


@pytest.mark.sweep
def test_apart_every_update_arrives() -> None:
    with verl_folder() as folder:
        run = run_ppo(folder, LARGE_STEPS, *APART, steps=2)
    assert min(run.correlations) > 0.99
    assert max(step["reshard/logprob_diff_mean"] for step in run.steps) < 0.05
    assert run.steps[1]["reshard/bytes_per_rank"] > 0
