"""Records the loaders of real models for `benchmark.gpu.replay`: `python -m benchmark.gpu.record [NAME ...]`.

SGLang's own model of each configuration is built on the meta device and its loader traced, as `sglang-reshard plan`
does. So it needs SGLang, and neither a GPU nor weights. One engine rank of each is kept: the others' are alike.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmark.gpu import recording
from sglang_reshard.cli.layouts import Source, StagedTarget, parsed
from sglang_reshard.cli.plan import worker_process
from sglang_reshard.cli.plan.checkpoint import prepare
from sglang_reshard.cli.plan.request import PlanRequest
from sglang_reshard.errors import Mismatch

_DEADLINE_S = 900.0


class Case(NamedTuple):
    """A model, the trainer's mesh, the engine's sizes, and how many layers; 0 for all."""

    model: str
    source: str
    target: str
    layers: int = 0


# Colocated trainers of one host: FSDP over its eight GPUs.
CASES = {
    "qwen3-8b-tp4": Case("qwen3-8b", "fsdp=8", "tp=4"),
    "qwen3-30b-a3b-tp8-ep8": Case("qwen3-30b-a3b", "fsdp=8", "tp=8,ep=8"),
    "qwen3-30b-a3b-tp8": Case("qwen3-30b-a3b", "fsdp=8", "tp=8"),
    "deepseek-v3-slice-tp8-ep8": Case("deepseek-v3", "fsdp=8", "tp=8,ep=8", 5),
}


def main(names: list[str]) -> None:
    for name in names or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory(prefix="sglang-reshard-record-") as folder:
            found = prepare(case.model, case.layers, Path(folder))
            request = PlanRequest(
                model=case.model,
                folder=str(found.resolve()),
                source=parsed(case.source, Source, "--source"),
                target=parsed(case.target, StagedTarget, "--target"),
                layers=case.layers,
                colocated=True,
            )
            path = recording.FOLDER / f"{name}.program"
            _record(request, path)
        copies, tensors = len((of := recording.load(path)).copies), len(of.layout.tensors)
        print(f"{path.name}: {path.stat().st_size:,} bytes, {copies:,} copies of {tensors:,} tensors")


def _record(request: PlanRequest, path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    job = {"request": msgspec.to_builtins(request), "path": str(path)}
    for _ in worker_process.run(
        "benchmark.gpu.record",
        "serve",
        job,
        what=f"The recording of {request.model}",
        environment=environment,
        deadline_seconds=_DEADLINE_S,
    ):
        pass


def serve(job: dict[str, Any]) -> None:
    """Entry point of the worker process, which can be one engine rank only."""
    import torch

    from sglang_reshard.cli.plan.checkpoint import specs_of
    from sglang_reshard.cli.plan.rank_model import Refusal, model_rank
    from sglang_reshard.cli.plan.request import layout_of
    from sglang_reshard.cli.plan.sglang_model import choose_code_paths
    from sglang_reshard.plan import TensorIndex

    request = msgspec.convert(job["request"], PlanRequest)
    choose_code_paths(request.target.tp, gpu=True)
    torch.set_num_threads(1)
    layout = layout_of(specs_of(Path(request.folder)), request.source)
    rank = 0
    found = model_rank(request, TensorIndex.of(layout), rank)
    if isinstance(found, Refusal):
        raise Mismatch(found.reason)
    targets = {name: (t.numel(), str(t.dtype).removeprefix("torch.")) for name, t in found.program.targets.items()}
    recorded = recording.Recording(
        model=request.model,
        source=str(request.source),
        target=str(request.target),
        layers=request.layers,
        engine_rank=rank,
        engine_ranks=request.target.ranks,
        layout=layout,
        targets=targets,
        copies=found.program.copies,
    )
    worker_process.report({"bytes": recording.save(Path(job["path"]), recorded)})


if __name__ == "__main__":
    main(sys.argv[1:])
