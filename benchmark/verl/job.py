"""The driver of one case: real actor workers, one real SGLang replica, and syncs by each path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark.verl.paths import Take, paths_of
from job import PROMPTS, Job, ray_of_its_own, verl_config
from sglang_reshard.selftest import tiny_model, verl_run

_NEW_TOKENS = 8
# What verl's own path needs to get along with this host's memory: buckets smaller than its default of 2,048, and a
# trainer in bfloat16, as every rank holds buckets of whole tensors in the trainer's dtype.
_SMALLER = [
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
]
_BACKEND = [*verl_run.RESHARD, *_SMALLER]
_UPDATES = {"reshard": (2, 10), "verl": (1, 3)}  # path -> untimed, timed


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each sync by each path, and whether the engine says the same after both."""
    folder, tp_size, ranks = Path(order["folder"]), order["tp_size"], order["ranks"]
    save_checkpoint(folder / "model", order["model_config"])
    colocated = order["mode"] == "colocated"
    devices = ranks if colocated else ranks + tp_size
    with ray_of_its_own(verl_config(folder, ranks, tp_size, "bfloat16", _BACKEND), devices):
        job = Job(
            folder,
            colocated=colocated,
            ranks=ranks,
            replicas=1,
            tp_size=tp_size,
            dtype="bfloat16",
            overrides=_BACKEND,
        )
        return _by_turns(job, paths_of(job))


def _by_turns(job: Job, paths: dict[str, Take]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    said, metrics, version = {}, {}, 0
    job.trainer.perturb(1)
    for path, (untimed, timed) in _UPDATES.items():
        paths[path]()
        seconds[path] = []
        for _ in range(untimed + timed):
            version += 1
            update = job.update(version)
            seconds[path].append(update["seconds"])
        seconds[path] = seconds[path][untimed:]
        said[path] = job.replicas[0].tokens(PROMPTS, _NEW_TOKENS)
        metrics[path] = {key: value for key, value in (update["metrics"] or {}).items() if key.startswith("reshard/")}
    return {"seconds": seconds, "same_tokens": said["reshard"] == said["verl"], "metrics": metrics["reshard"]}


def save_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A whole checkpoint of these shapes with random weights, and the tests' tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny_model.save(folder, 1, 1)
    verl_run.for_chats(folder)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
