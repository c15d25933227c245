"""Runs of real verl on this host: in a process of its own, with a Ray of its own, under a deadline."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_reshard.testing.cpu_host import verl_settings
from support import descendants, zygote

TEST = Path(__file__).parent.parent
_TAIL_CHARACTERS = 12_000
# Steps so large that one that never reached the engine cannot be overlooked.
LARGE_STEPS = "actor_rollout_ref.actor.optim.lr=1e-2"


@dataclass(frozen=True)
class PpoRun:
    """log: all output. steps: verl's metrics of each step."""

    log: str
    steps: list[dict[str, float]]

    @property
    def correlations(self) -> list[float]:
        """How closely probabilities of sampled tokens agree between rollout and trainer, by step: 1 is perfect."""
        return [step["training/rollout_actor_probs_pearson_corr"] for step in self.steps]


@contextmanager
def verl_folder() -> Iterator[Path]:
    """Not pytest's own: Ray has sockets below it, and a socket's path holds 107 characters."""
    with tempfile.TemporaryDirectory(prefix="verl-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def environment(folder: Path, tp_size: int) -> dict[str, str]:
    """Of a driver whose Ray, caches and home are in `folder`."""
    variables = {**descendants.clean_environment(), **verl_settings.environment(tp_size)}
    path = [str(TEST.parent), str(TEST), str(TEST / "verl"), variables["PYTHONPATH"]]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(path),
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        zygote.VARIABLE: "verl",
        # A cluster of its own, even where another one runs.
        "RAY_ADDRESS": "local",
        # By default workers, and the engines that they start, give way to everything else on the host.
        "RAY_worker_niceness": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_LOGGING_LEVEL": "WARN",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "HYDRA_FULL_ERROR": "1",
    }


def run_ppo(folder: Path, *overrides: str, steps: int = 2, timeout_s: float = 900, main: str | None = None) -> PpoRun:
    """examples/tiny_on_cpu.py: GRPO by `verl.trainer.main_ppo`, or by `main`; `overrides` are hydra's, and win."""
    settings = [f"trainer.total_training_steps={steps}", f"trainer.total_epochs={steps}", *overrides]
    log = run_driver("jobs:ppo", folder, {"overrides": settings, "main": main}, tp_size=2, timeout_s=timeout_s)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return PpoRun(log, [json.loads(line)["data"] for line in lines])


def run_job(function: str, folder: Path, *, tp_size: int, timeout_s: float = 900, **job: Any) -> Any:
    """What `function` ("module:name" of a module in test/verl) returned as a driver of verl.

    It is called with a dictionary of `job`, `folder` and `tp_size`.
    """
    run_driver(function, folder, job, tp_size=tp_size, timeout_s=timeout_s)
    return json.loads((folder / "result.json").read_text())


def run_driver(function: str, folder: Path, job: Mapping[str, Any], *, tp_size: int, timeout_s: float) -> str:
    """The output of `function` as a driver of verl. Fails with the end of it when the driver does."""
    order, log = json.dumps({"folder": str(folder), "tp_size": tp_size, **job}), folder / "log"
    command = [sys.executable, "-m", "support.verl_driver", function, order]
    try:
        status = descendants.run(command, environment(folder, tp_size), folder, log, timeout_s)
    except descendants.Deadline as error:
        raise AssertionError(f"{error}\n{_tail(log)}") from error
    assert status == 0, f"exit status {status}\n{_tail(log)}"
    return log.read_text(errors="replace")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
