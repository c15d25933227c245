"""The example scripts set what verl has: each of their overrides composes with verl's own configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = {"colocated_qwen3_8b.sh": "sync", "disaggregated_32_to_64.sh": "separate_async"}


def composed(script: str, folder: Path) -> DictConfig:
    """verl's configuration, with what the script would start `python` with."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\n')
    python.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "TRAIN": "/train", "VAL": "/val"}
    ran = subprocess.run([EXAMPLES / script], env=environment, capture_output=True, text=True, check=True)
    flag, module, *overrides = ran.stdout.splitlines()
    assert (flag, module) == ("-m", "verl.trainer.main_ppo")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


@pytest.mark.parametrize("script", MODES)
def test_every_override_is_known_to_verl(script: str, tmp_path: Path) -> None:
    config = composed(script, tmp_path)
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    assert (engine.backend, engine.custom_backend_module) == ("reshard", "sglang_reshard.verl")
    assert config.trainer.v1.trainer_mode == MODES[script]


def test_the_disaggregated_run_is_one_that_verl_accepts(tmp_path: Path) -> None:
    """verl checks it in the trainer's constructor, after the cluster is up."""
    config = composed("disaggregated_32_to_64.sh", tmp_path)
    steps = config.trainer.v1.separate_async.parameter_sync_step
    assert config.data.train_batch_size == steps * config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 32
    assert config.actor_rollout_ref.rollout.nnodes * config.actor_rollout_ref.rollout.n_gpus_per_node == 64
