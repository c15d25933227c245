"""A trainer rank of one case: `torchrun -m benchmark.trainer JOB`, with the JSON of `Job`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmark import exactness, paths, timing
from benchmark.cases import Case, Effort
from benchmark.copying import Copiers
from benchmark.weights import Weights
from sglang_reshard.errors import ReshardError
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.selftest.digests import LOADER, Digests
from sglang_reshard.selftest.stock import prepare
from sglang_reshard.testing import cpu_host

_COPIES = 4  # after each path, so that the limit is of the same minutes, and of the same load by others


class Job(msgspec.Struct, frozen=True):
    """folder: where the model's config is put, and the result, `seen.json`."""

    case: Case
    paths: tuple[str, ...]
    effort: Effort
    device: str
    folder: str


class Seen(msgspec.Struct, frozen=True):
    """What came of a case.

    refused    path -> why it did not run
    copies     seconds of copying `timing.least_bytes`, each time
    reference  digests after a stock load from disk
    """

    timed: list[timing.Timed]
    refused: dict[str, str]
    copies: list[float]
    reference: Digests


def main(job: Job) -> None:
    device = join(job.device, job.case.trainers)
    prepare()
    with engine_and_weights(job, LOADER) as (engine, weights):
        seen = _run(job, engine, weights, device)
        if engine is not None:
            (Path(job.folder) / "seen.json").write_bytes(msgspec.json.encode(seen))


@contextmanager
def engine_and_weights(job: Job, loader: str) -> Iterator[tuple[Any, Weights]]:
    """Yields the engine, on rank 0 only, and this rank's weights. The engine may be asked to use `loader`."""
    case, model_path = job.case, Path(job.folder) / "model"
    engine = None
    if dist.get_rank() == 0:
        model_path.mkdir()
        (model_path / "config.json").write_text(json.dumps(case.model.config()))
        engine = _start_engine(model_path, job, loader)
    dist.barrier()
    try:
        yield engine, Weights(case.model.shapes(), init_device_mesh(job.device, (case.trainers,)))
    finally:
        if engine is not None:
            from sglang_reshard.patches.engine import end

            end(engine)
    dist.barrier()
    dist.destroy_process_group()


def _run(job: Job, engine: Any, weights: Weights, device: torch.device) -> Seen:
    case, folder = job.case, Path(job.folder)
    timed, refused = [], {}
    copies: list[float] = []
    copiers: Copiers | None = None
    for name in job.paths:
        path = paths.make(name, engine, case.engine_tp)
        try:
            counts = job.effort.of(name)
            timed.append(timing.measure(name, path, weights, counts, engine, device, folder / "digests"))
        except ReshardError as error:  # the same on every trainer rank
            refused[name] = str(error)
        path.close()
        if engine is not None and any(t.reports for t in timed):
            copiers = copiers or Copiers(timing.least_bytes(timed), job.device)
            copies += [copiers.seconds() for _ in range(_COPIES)]
        dist.barrier()
        _say(f"{case.name}: {name} is done" if name not in refused else f"{case.name}: {name}: {refused[name]}")
    if copiers is not None:
        copiers.close()
    reference = exactness.stock_load(weights, engine, folder / "model", folder / "digests")
    return Seen(timed, refused, copies, reference)


def join(kind: str, trainers: int) -> torch.device:
    if kind == "cpu":
        dist.init_process_group("cpu:gloo")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    # NCCL wants a GPU for each rank. Where ranks share one, gloo gathers, in host memory: see `gather`.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus >= trainers else "cpu:gloo,cuda:gloo")
    device = torch.device("cuda", dist.get_rank() % gpus)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # a mesh would choose a GPU by the local rank otherwise, also one that is not there
    return device


def _start_engine(model_path: Path, job: Job, loader: str) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    arguments: dict[str, Any] = {
        "model_path": str(model_path),
        "tp_size": job.case.engine_tp,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "context_length": 256,
        "custom_weight_loader": [loader],
        "log_level": "error",
    }
    if job.device == "cpu":
        arguments = cpu_host.engine_arguments(**arguments)
    else:
        arguments |= {"mem_fraction_static": 0.3, "max_total_tokens": 2048, "disable_cuda_graph": True}
    with without_torchrun_variables():
        return Engine(**arguments)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
