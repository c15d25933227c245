"""Computes the digests that every engine rank has after a stock `load_weights`, without starting an engine.

A worker process imports SGLang once and forks a child for each rank; each child starts its rank's model on the first
checkpoint, by SGLang's own loader, and loads one checkpoint after the other, as an engine that is updated would. So
what no checkpoint has is as the model's constructor leaves it, and not as dummy weights would have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.cli.plan import worker_process
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import build_rank, import_before_forks
from sglang_reshard.selftest.digests import digests
from sglang_reshard.testing import cpu_host


def stock_digests(
    model_path: str | Path,
    checkpoints: Sequence[str | Path],
    *,
    tp_size: int,
    dtype: str = "bfloat16",
    ranks: Sequence[int] | None = None,
    ep_size: int = 1,
    processes: int = 2,
    on_rank: Callable[[int], None] | None = None,
    deadline_seconds: float = 600,
    **server_args: Any,
) -> list[dict[int, dict[str, str]]]:
    """Returns, for each checkpoint (a folder of safetensors): engine rank -> path of a live tensor -> digest.

    `on_rank` is called with each rank when it is done. On a host without a GPU the CPU engine's code paths are taken,
    so that the digests compare with a live engine's.
    """
    ranks = list(range(tp_size)) if ranks is None else list(ranks)
    job = {
        "model_path": str(model_path),
        "checkpoints": [str(c) for c in checkpoints],
        "ranks": ranks,
        "processes": processes,
        "deadline_seconds": deadline_seconds,
        "build": {"tp_size": tp_size, "ep_size": ep_size, "dtype": dtype, **server_args},
    }
    found: dict[int, list[dict[str, str]]] = {}
    loading = worker_process.run(
        __name__,
        "_serve",
        job,
        what=f"Stock loading of {model_path}",
        environment=_environment(tp_size),
        deadline_seconds=deadline_seconds,
    )
    for rank, of_checkpoints in loading:
        found[rank] = of_checkpoints
        if on_rank is not None:
            on_rank(rank)
    return [{rank: found[rank][i] for rank in ranks} for i in range(len(checkpoints))]


def _environment(tp_size: int) -> dict[str, str]:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not torch.cuda.is_available():
        return {**os.environ, **cpu_host.environment(tp_size)}
    return dict(os.environ)


# ---- in the worker process


def _weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"There are no safetensors in {folder}.")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)


def _serve(job: dict[str, Any]) -> None:
    import_before_forks()

    def load(rank: int) -> list[dict[str, str]]:
        first, *others = job["checkpoints"]
        next(_weights(first))  # names a folder without weights
        model = build_rank(job["model_path"], tp_rank=rank, weights=first, **job["build"])
        found = [digests(model)]
        for folder in others:
            with torch.no_grad():
                model.load_weights(_weights(folder))  # type: ignore[operator]
            found.append(digests(model))
        return found

    results = run_in_forks(load, job["ranks"], processes=job["processes"], deadline_seconds=job["deadline_seconds"])
    for rank, found in results:
        worker_process.report([rank, found])
