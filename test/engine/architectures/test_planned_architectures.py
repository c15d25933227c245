"""What `plan` traces of a model without memory is what an engine rank traces of the same model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examination import built
from rank_jobs import run_jobs
from sglang_reshard.cli.layouts import Source, StagedTarget
from sglang_reshard.cli.plan.checkpoint import specs_of
from sglang_reshard.cli.plan.rank_model import Refusal, model_rank
from sglang_reshard.cli.plan.request import PlanRequest, layout_of
from sglang_reshard.cli.plan.worker_process import run_in_forks
from sglang_reshard.plan import TensorIndex
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.checkpoints import write_checkpoint

RESULTS = Path(__file__).parents[3] / "benchmark" / "results" / "architectures.json"
TP, RANK = 2, 1


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
    return PlanRequest(model="tiny", folder=folder, source=Source(fsdp=2), target=StagedTarget(tp=TP))


def planned(folder: str) -> tuple[Any, ...] | str:
    """Returns the copies and targets that `plan` finds, or why it refuses."""
    request = request_of(folder)
    index = TensorIndex.of(layout_of(specs_of(Path(folder)), request.source))
    found = model_rank(request, index, RANK)
    if isinstance(found, Refusal):
        return f"{found.phase}: {found.reason}"
    return _facts(found.program)


def in_memory(folder: str) -> tuple[Any, ...]:
    """Returns the same of a model that was built in memory, as live engines are."""
    model = built(folder, True, {"tp_size": TP, "tp_rank": RANK})
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


pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def compared(root: Path, name: str) -> tuple[int, str]:
    """Returns the number of copies in memory, and what is wrong with the plan, if anything."""
    entry = exact()[name]
    folder = write_checkpoint(
        entry["checkpoint"], root / name, architecture=name, variants=tuple(entry["config"] or ())
    )
    assert folder is not None
    # Each in a fork: a process is one engine rank only.
    plan, memory = (
        next(run_in_forks(side, [folder], processes=1, deadline_seconds=600))[1] for side in (planned, in_memory)
    )
    return len(memory[0]), difference(plan, memory)


# Tensors on the current device, whatever the default one is; experts; attention alone.
FEW = ("Qwen3NextForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")


# `plan` refuses them, and says why: a constructor and a loader that ask for values, which nothing has without memory.
ASK_FOR_VALUES = {"InternVLChatModel", "MllamaForConditionalGeneration"}


def differing(names: list[str], folder: Path) -> list[tuple[str, str]]:
    found = run_jobs(compared, [(name,) for name in names], folder, deadline_s=3000)
    assert sorted(name for name, _ in found) == sorted(names)
    assert all(copies for _, (copies, _) in found)
    return [(name, wrong) for name, (_, wrong) in found if wrong]


def test_plans_of_a_few_architectures_are_those_of_models_in_memory(tmp_path: Path) -> None:
    assert differing(list(FEW), tmp_path) == []


@pytest.mark.sweep
def test_plans_of_all_architectures_whose_row_is_exact_are_those_of_models_in_memory(tmp_path: Path) -> None:
    names = list(exact())
    assert len(names) >= 50
    found = dict(differing(names, tmp_path))
    assert found.keys() == ASK_FOR_VALUES, found
    assert all("not the same" not in why for why in found.values())
