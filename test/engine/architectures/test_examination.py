"""The examination of an engine rank sees what is wrong: with a trace that lies it does not pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import examination
from rank_jobs import run_jobs
from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.tracer import trace
from support.checkpoints import write_checkpoint

NORM = "model.norm.weight"


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


MUTANTS = {mutant.__name__: mutant for mutant in (trace, swapped, writing, moving, refusing)}


def write(folder: Path) -> None:
    write_checkpoint("Qwen3MoeForCausalLM", folder)


def examined(folder: Path, mutant: str) -> tuple[str, str]:
    vars(examination)["trace"] = MUTANTS[mutant]
    found = examination.examine(str(folder), tp_size=2, tp_rank=0)
    return found.outcome, found.why


pytestmark = pytest.mark.engine


def test_every_mutant_of_the_trace_is_told(tmp_path):
    said = dict(run_jobs(examined, [(name,) for name in MUTANTS], tmp_path, before=write, ranks=4))
    assert said["trace"] == ["passed", ""]
    for name, words in {
        "swapped": "1 of 43 live tensors differ: model.layers.0.mlp.experts.w13_weight",
        "writing": f"the trace wrote to {NORM}",
        "moving": "live tensors have moved",
        "refusing": f"stock loading writes {NORM}",
    }.items():
        outcome, why = said[name]
        assert outcome == "failed"
        assert words in why
