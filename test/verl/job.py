"""A driver of verl in a test: its configuration, a Ray of its own, a trainer, engines, and what was seen of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from benchmark.reference import greedy_tokens
from job_replica import JobReplica
from job_trainer import JobTrainer
from sglang_reshard.selftest import text, verl_run
from sglang_reshard.selftest.digests import LOADER
from sglang_reshard.testing.cpu_host import verl_settings

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
LONG = 200  # tokens; takes seconds


class Job:
    """What a job is made of, by verl's own classes.

    colocated  engines share the trainer's devices; else each replica has its own
    replicas   how many engines; `spare` says for how many more there are devices
    """

    def __init__(
        self,
        folder: Path,
        *,
        colocated: bool,
        ranks: int,
        replicas: int,
        tp_size: int,
        dtype: str,
        overrides: Sequence[str],
    ) -> None:
        from verl.checkpoint_engine import CheckpointEngineManager
        from verl.utils.config import omega_conf_to_dataclass

        self.folder, self.colocated = folder, colocated
        self.config = verl_config(folder, ranks, tp_size, dtype, overrides)
        self.trainer = JobTrainer(self.config, ranks, "actor_rollout" if colocated else "actor")
        self.replicas = [self.new_replica(rank) for rank in range(replicas)]
        backend = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        if colocated:
            backend.backend = "naive"  # as verl's trainers do, whatever is configured
        self.manager = CheckpointEngineManager(
            config=backend,
            actor_wg=self.trainer.group,
            replicas=[r.replica for r in self.replicas],
        )
        self.trainer.count_gathers()

    def new_replica(self, replica_rank: int) -> JobReplica:
        return JobReplica(self.config, replica_rank, self.trainer.group if self.colocated else None)

    def update(self, version: int) -> dict[str, Any]:
        """verl's update, as its trainer for this placement calls it. seconds: of `update_weights` alone."""
        if self.colocated:  # else the manager does this itself
            self.manager.abort_replicas()
            self.manager.sleep_replicas()
        self.trainer.gathers()
        started = time.perf_counter()
        metrics = self.manager.update_weights(global_steps=version)
        seconds = time.perf_counter() - started
        if self.colocated:
            self.manager.resume_generation_replicas()
        return {"metrics": metrics, "seconds": seconds, "gathers": self.trainer.gathers(), **self.trainer.sizes()}

    def change_and_update(self, version: int, only: str = "") -> dict[str, Any]:
        """The trainer's weights change, all engines are updated, and everything is looked at.

        only  part of the names of those that change
        """
        self.trainer.perturb(version, only)
        update = self.update(version)
        checkpoint = self.trainer.save(self.folder / f"checkpoint-{version}")
        return {
            **update,
            "digests": [r.live_digests(self.folder / "digests") for r in self.replicas],
            "tokens": [r.tokens(PROMPTS, text.NEW_TOKENS) for r in self.replicas],
            "expected_tokens": expected_tokens(checkpoint),
        }

    def ask_for_long(self) -> list[Any]:
        """Requests that are under way on each replica, for long."""
        asked = [r.ask(PROMPTS[0], LONG) for r in self.replicas]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0.5)
        assert not done, "a request meant to be under way during an update was answered before it"
        return asked


@contextmanager
def a_job(order: dict[str, Any], *, spare: int = 0) -> Iterator[Job]:
    """A job in a Ray of its own, or in that at `ray` of the order. order: `folder` and what `Job` takes, too.

    spare  devices for engines to come
    """
    arguments = {**order, "folder": Path(order["folder"])}
    address = arguments.pop("ray", "")
    ranks, tp_size = order["ranks"], order["tp_size"]
    verl_run.save_model(arguments["folder"] / "model", ranks, tp_size)
    devices = ranks if order["colocated"] else ranks + order["replicas"] * tp_size + spare
    config = verl_config(arguments["folder"], ranks, tp_size, order["dtype"], order["overrides"])
    with ray_at(address) if address else ray_of_its_own(config, devices):
        yield Job(**arguments)


@contextmanager
def ray_at(address: str) -> Iterator[None]:
    ray.init(address=address)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def ray_of_its_own(config: Any, devices: int) -> Iterator[None]:
    """A Ray with so many "GPUs", as verl's configuration has it otherwise."""
    settings = {key: value for key, value in config.ray_kwargs.ray_init.items() if key != "runtime_env"}
    ray.init(**{**settings, "num_gpus": devices})
    try:
        yield
    finally:
        ray.shutdown()


def verl_config(folder: Path, ranks: int, tp_size: int, dtype: str, overrides: Sequence[str]) -> Any:
    """verl's own configuration as `main_ppo` would have it, for the model in `folder`."""
    import hydra
    import verl.trainer

    settings = [
        *verl_settings.overrides(),
        *verl_run.tiny_run(folder, ranks, tp_size),
        f"actor_rollout_ref.rollout.dtype={dtype}",
        f"+actor_rollout_ref.rollout.engine_kwargs.sglang.custom_weight_loader=[{LOADER}]",
        *overrides,
    ]
    configs = Path(verl.trainer.__file__).parent / "config"
    with hydra.initialize_config_dir(str(configs), version_base=None):
        return hydra.compose("ppo_trainer", overrides=settings)


def expected_tokens(checkpoint: Path) -> list[list[int]]:
    torch.set_num_threads(1)
    return greedy_tokens(checkpoint, PROMPTS, text.NEW_TOKENS, "float32")[0]
