"""Plans an engine rank of architectures without memory, beside a trace of the same rank in memory.

Run as a script by test_planned_architectures.py: answers with a line of JSON for each architecture, in which the last
item says what is wrong, if anything.

    planned_architectures.py FOLDER NAME ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.cli.plan import sglang_model
from sglang_reshard.cli.plan.checkpoint import specs_of
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.rank_model import Refusal, model_rank
from sglang_reshard.cli.plan.request import EngineSizes, PlanRequest, Source
from sglang_reshard.cli.plan.sources import layout_of
from sglang_reshard.plan import TensorIndex
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.checkpoints import write_checkpoint
from support.scripts import answer

RESULTS = Path(__file__).parents[3] / "benchmark" / "results" / "architectures.json"
TP, RANK = 2, 1
_DEADLINE_S = 3000


def exact() -> dict[str, Any]:
    """Returns the entries of the architectures whose rank here was traced and held against stock loading, by name."""
    saved = json.loads(RESULTS.read_text())["architectures"]
    runs = {name: entry["runs"].get(f"tp {TP}", {"ranks": {}}) for name, entry in saved.items()}
    return {name: saved[name] for name, run in runs.items() if run["ranks"].get(str(RANK)) == "passed" and _fresh(run)}


def _fresh(run: dict[str, Any]) -> bool:
    """Returns whether it passed in an engine that had not loaded a checkpoint before."""
    why = run.get("why", "")
    return not why or why.startswith("a start on the checkpoint leaves")


def request_of(folder: str) -> PlanRequest:
    return PlanRequest(model="tiny", folder=folder, source=Source(shards=2), target=EngineSizes(tp=TP))


def planned(folder: str) -> tuple[Any, ...] | str:
    """Returns the copies and targets that `plan` finds, or why it refuses."""
    request = request_of(folder)
    index = TensorIndex.of(layout_of(specs_of(Path(folder)), request.source))
    found = model_rank(request, index, 1, RANK)
    if isinstance(found, Refusal):
        return f"{found.phase}: {found.reason}"
    return _facts(found.program)


def in_memory(folder: str) -> tuple[Any, ...]:
    """Returns the same of a model that was built in memory, as live engines are."""
    vars(torch.cuda)["_lazy_init"] = _no_gpu
    try:
        model = sglang_model.build_rank(folder, tp_size=TP, tp_rank=RANK, attention_backend="triton")
    except AssertionError as error:
        if "attention backend" not in str(error):
            raise
        model = sglang_model.build_rank(folder, tp_size=TP, tp_rank=RANK, attention_backend="torch_native")
    specs = specs_of(Path(folder))
    program = trace(model, specs, lambda: EngineStart(specs))  # what a start leaves alone may stay
    return _facts(program)


def _facts(program: Program) -> tuple[Any, ...]:
    targets = {name: (t.numel(), t.dtype) for name, t in program.targets.items()}
    return program.copies, targets, dict(program.arrivals)


def difference(plan: tuple[Any, ...] | str, memory: tuple[Any, ...]) -> str:
    if isinstance(plan, str):
        return plan
    what = "copies", "targets", "arrivals"
    return "; ".join(
        f"{len(memory[i])} {what[i]} in memory, {len(plan[i])} in the plan, not the same"
        for i in range(3)
        if plan[i] != memory[i]
    )


def _no_gpu() -> None:
    raise RuntimeError("there is no GPU on this host")


def _written(root: str, saved: dict[str, Any], name: str) -> str:
    entry = saved[name]
    folder = write_checkpoint(
        entry["checkpoint"], Path(root) / name, architecture=name, variants=tuple(entry["config"] or ())
    )
    assert folder is not None
    return folder


def _forked(work: Any, jobs: Sequence[str]) -> Iterator[tuple[str, Any]]:
    return run_in_forks(work, jobs, processes=2, deadline_seconds=_DEADLINE_S)


def main(root: str, *names: str) -> None:
    sglang_model.choose_code_paths(TP, gpu=True)
    torch.set_num_threads(1)
    sglang_model.import_before_forks()
    folders = dict(_forked(partial(_written, root, exact()), names))
    plans = dict(_forked(lambda name: planned(folders[name]), names))
    for name, memory in _forked(lambda name: in_memory(folders[name]), names):
        answer(json.dumps([name, len(memory[0]), difference(plans[name], memory)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
