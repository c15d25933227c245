"""verl's other trainers: the one before v1, asynchronous ones, colocated and apart, and one step off policy."""

from __future__ import annotations

import pytest

from support.verl_host import LARGE_STEPS, run_ppo, verl_folder

pytestmark = [pytest.mark.verl, pytest.mark.sweep, pytest.mark.usefixtures("forks")]
# Else these trainers take the rollout's log-probabilities for the actor's, and compare nothing.
COMPARED = [
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "algorithm.rollout_correction.bypass_mode=False",
    "++actor_rollout_ref.actor.use_rollout_log_probs=False",
]
APART = [
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=4",
    "ray_kwargs.ray_init.num_cpus=40",
]
FULLY_ASYNC = [
    *APART,
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "async_training.staleness_threshold=0",
    "async_training.trigger_parameter_sync_step=1",
    "rollout.total_rollout_steps=12",
]
VERIFIED = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.verify=full"
FULLY_ASYNC_MAIN = "verl.experimental.fully_async_policy.fully_async_main"


def test_the_legacy_trainer_gets_every_update() -> None:
    with verl_folder() as folder:
        run = run_ppo(folder, LARGE_STEPS, *COMPARED[:1], "trainer.use_v1=False", steps=2)
    assert min(run.correlations) > 0.99
    assert run.steps[0]["reshard/bytes_per_rank"] > 0


def test_a_colocated_asynchronous_trainer_gets_every_update() -> None:
    """Without batches that it samples ahead, from older weights."""
    mode = ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0"]
    with verl_folder() as folder:
        run = run_ppo(folder, LARGE_STEPS, *mode, steps=3)
    assert min(run.correlations) > 0.99
    assert max(step["reshard/logprob_diff_mean"] for step in run.steps) < 0.05
    assert [step["reshard/logprob_diff_max_version"] for step in run.steps] == [0, 1, 2]


def test_one_step_off_policy_gets_every_update() -> None:
    """It trains on samples of weights that are a step older, so digests are compared and no probabilities."""
    with verl_folder() as folder:
        main = "verl.experimental.one_step_off_policy.main_ppo"
        # Its own configuration is found in a checkout of verl only.
        found = "hydra.searchpath=[pkg://verl.trainer.config]"
        run = run_ppo(folder, found, LARGE_STEPS, VERIFIED, *APART, *COMPARED, steps=3, main=main)
    assert [step["reshard/logprob_diff_max_version"] for step in run.steps] == [0, 1, 2]
    assert all(step["reshard/seconds/verify"] > 0 for step in run.steps)


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "standalone"])
def test_a_fully_asynchronous_trainer_gets_every_update(hybrid: bool) -> None:
    """With standalone replicas, and with hybrid ones that it adds to them while they generate."""
    dynamic = f"async_training.use_dynamic_resource_scheduling={hybrid}"
    with verl_folder() as folder:
        run = run_ppo(folder, LARGE_STEPS, dynamic, *FULLY_ASYNC, *COMPARED, steps=3, main=FULLY_ASYNC_MAIN)
    trained = [step for step in run.steps if "reshard/logprob_diff_max_version" in step]
    assert [step["reshard/logprob_diff_max_version"] for step in trained] == [0, 1]
    assert min(step["training/rollout_actor_probs_pearson_corr"] for step in trained) > 0.99
    assert sum(step.get("reshard/bytes_per_rank", 0) > 0 for step in run.steps) >= len(trained)
    assert ("Activating hybrid replicas" in run.log) == hybrid
