"""Runs a function of a test for one job after the other, each in a fork of a process that has imported SGLang.

    found = run_jobs(updates, [("Qwen3MoeForCausalLM", 0)], tmp_path)    # [["Qwen3MoeForCausalLM", 0, ...], ...]

SGLang chooses between the code paths of GPUs and of CPUs at import, and a process can be one engine rank only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support import sglangs, zygote
from support.scripts import answer, run_script


def run_jobs(
    work: Callable[..., Any],
    jobs: Iterable[tuple[Any, ...]] | Callable[[], list[tuple[Any, ...]]],
    folder: Path,
    *,
    before: Callable[..., Any] | None = None,
    ranks: int = 2,
    gpu: bool = True,
    deadline_s: float = 500,
) -> list[Any]:
    """Returns of each job `[*job, work(folder, *job)]`, as JSON has it, in the order in which they end.

    jobs    their arguments, or what returns these in that process
    before  called first with `folder`, in that process
    ranks   of the largest engine
    """
    newest = str(sglangs.NEWEST) in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kind = {zygote.VARIABLE: "none" if newest else "gpu"} if gpu else {}
    known = jobs.__name__ if callable(jobs) else list(jobs)
    order = [work.__module__, work.__name__, before and before.__name__, ranks, gpu, deadline_s, known]
    own = str(Path(sys.modules[work.__module__].__file__ or "").parent)
    lines = run_script(
        Path(__file__), own, str(folder), json.dumps(order), timeout_s=2 * deadline_s + 600, environment=kind
    )
    return [json.loads(line) for line in lines]


def main(own: str, folder: str, order: str) -> None:
    from examination import begin, remember_modules
    from sglang_reshard.cli.plan.worker_process import run_in_forks

    module, work, before, ranks, gpu, deadline_s, jobs = json.loads(order)
    begin(ranks, gpu=gpu)
    remember_modules()
    sys.path.insert(0, own)
    test = importlib.import_module(module)
    if before:
        getattr(test, before)(Path(folder))
    if isinstance(jobs, str):
        jobs = getattr(test, jobs)()

    def one(job: list[Any]) -> Any:
        return getattr(test, work)(Path(folder), *job)

    for job, result in run_in_forks(one, jobs, processes=2, deadline_seconds=deadline_s):
        answer(json.dumps([*job, result]))


if __name__ == "__main__":
    main(*sys.argv[1:])
