"""How a job's next syncs go, by verl's own path or by ours, between the same workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ray

from benchmark.verl import rank0_broadcast
from job import Job

Take = Callable[[], object]


def paths_of(job: Job) -> dict[str, Take]:
    """Path -> a call after which the job's updates go that way.

    verl's own is "naive" where trainer and engine share devices: every tensor is gathered on every trainer rank, and
    handed to the server in buckets. Where they do not it is "nccl", which needs GPUs; a broadcast of full tensors by
    trainer rank 0 over gloo stands for it.
    """
    if job.colocated:
        return {
            "reshard": functools.partial(job.trainer.each, _take_backend, "reshard"),
            "verl": functools.partial(job.trainer.each, _take_backend, "naive"),
        }
    return {path: functools.partial(_take_engine, job, path) for path in ("reshard", "verl")}


def _take_engine(job: Job, path: str) -> None:
    from verl.checkpoint_engine import CheckpointEngineManager

    backend = "reshard" if path == "reshard" else rank0_broadcast.BACKEND
    workers = [*job.trainer.group.workers, *(w for r in job.replicas for w in r.replica.workers)]
    ray.get([worker.__ray_call__.remote(_take_engine_here, path) for worker in workers])
    job.manager = CheckpointEngineManager(
        config=dataclasses.replace(job.manager.config, backend=backend),
        actor_wg=job.trainer.group,
        replicas=job.manager.replicas,
    )


# ---- inside a worker


def _take_backend(worker: Any, backend: str) -> None:
    worker.rollout.config.checkpoint_engine.backend = backend


def _take_engine_here(worker: Any, path: str) -> None:
    """Put the path's checkpoint engine in the worker's, and keep the other one for later."""
    kept = vars(worker).setdefault("benchmark_engines", {"reshard": worker.checkpoint_engine})
    if path not in kept:
        is_master = {"is_master": worker.rank == 0} if hasattr(worker, "actor") else {}
        kept[path] = rank0_broadcast.Rank0Broadcast(256 << 20, **is_master)
    worker.checkpoint_engine = kept[path]
