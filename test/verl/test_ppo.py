"""`python -m verl.trainer.main_ppo` with engines on the trainer's own devices: every update arrives.

What tells is how well the trainer and the engine agree on the probabilities of the tokens that the engine
chose: they agree while both have the same weights. The last update is lost on purpose, and they no longer do.
"""

from __future__ import annotations

import pytest

from support.verl_host import run_ppo, verl_folder

pytestmark = [pytest.mark.verl, pytest.mark.timeout(420)]


def test_every_update_arrives_until_one_is_lost() -> None:
    with verl_folder() as folder:
        run = run_ppo(folder, "actor_rollout_ref.model.external_lib=drop_sync", steps=3)
    first, second, after_the_lost_one = run.correlations
    assert min(first, second) > 0.99
    assert "the update after step 2 is lost" in run.log
    assert after_the_lost_one < 0.9
    assert run.steps[0]["reshard/bytes_per_rank"] > 0
