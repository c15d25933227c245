"""Examines one engine rank with a trace that is wrong in one way after another; answers with what is said
of each.

Run as a script by test_examination.py, because SGLang chooses its code paths at import.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import examination
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.tracer import trace
from support.checkpoints import write_checkpoint
from support.scripts import answer

NORM = "model.norm.weight"


def right(model: Any, *rest: Any) -> Program:
    return trace(model, *rest)


def swapped(model: Any, *rest: Any) -> Program:
    """Two experts' weights, of one shape, each in the other's place."""
    program = trace(model, *rest)
    copies = list(program.copies)
    a, b = (next(i for i, c in enumerate(copies) if c.source.endswith(f"experts.{n}.gate_proj.weight")) for n in (0, 1))
    one, other = copies[a].source, copies[b].source
    copies[a], copies[b] = dataclasses.replace(copies[a], source=other), dataclasses.replace(copies[b], source=one)
    return dataclasses.replace(program, copies=tuple(copies))


def writing(model: Any, *rest: Any) -> Program:
    program = trace(model, *rest)
    model.get_parameter(NORM).data.fill_(1)
    return program


def moving(model: Any, *rest: Any) -> Program:
    program = trace(model, *rest)
    norm = model.get_parameter(NORM)
    norm.data = norm.data.clone()
    return program


def refusing(model: Any, *rest: Any) -> Program:
    raise Unsupported(f"{NORM} is not written by the loader at all: a mutant says so.")


MUTANTS = (right, swapped, writing, moving, refusing)


def main(folder: str) -> None:
    examination.begin(4)
    path = write_checkpoint("Qwen3MoeForCausalLM", Path(folder))
    assert path is not None

    def examined(mutant: Callable[..., Program]) -> examination.Finding:
        vars(examination)["trace"] = mutant
        return examination.examine(path, tp_size=2, tp_rank=0)

    for mutant, found in run_in_forks(examined, MUTANTS, processes=2, deadline_seconds=300):
        answer(json.dumps([mutant.__name__, found.outcome, found.why]))


if __name__ == "__main__":
    main(sys.argv[1])
