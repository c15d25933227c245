"""Sends the states of transformers' own models, under the names that they have there, to SGLang's: JSON for each model.

Run as a script by test_transformers_names.py: SGLang chooses its code paths at import.

    transformers_names.py FOLDER [ARCHITECTURE...]     all that read images or sound, by default
"""

from __future__ import annotations

import functools
import glob
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from architecture_cases import RESULTS
from architectures import Architecture, generation
from examination import begin, built, said, specs_of
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.engine.names.search import Reading, find_names, reading
from sglang_reshard.engine.target_planning import LoaderNames
from sglang_reshard.errors import ReshardError
from sglang_reshard.trace.names_read import names_read
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.live_memory import differing, fill_with_garbage
from support.scripts import answer
from tools.oracle.digests import digests
from tools.oracle.replay import replay

Weights = dict[str, torch.Tensor]
TP, DEADLINE_S = 2, 1500
THINKER = "thinker."


def states(architecture: Architecture, folder: str, weights: Weights) -> dict[str, tuple[Weights, list[str]]]:
    """What trainers send, and the names of tied tensors among it: transformers' model, and a thinker by itself."""
    model = getattr(transformers, str(architecture.writer)).from_pretrained(folder, dtype=torch.bfloat16)
    own = dict(model.named_parameters())
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]
    found = {"transformers": (state, tied)}
    if any(name.startswith(THINKER) for name in weights):
        found["thinker"] = {n.removeprefix(THINKER): t for n, t in weights.items()}, []
    return found


def outcome(model: torch.nn.Module, started_on: Weights, sent: Weights, tied: Sequence[str]) -> dict[str, Any]:
    """Whether an engine rank is updated from `sent` to what stock loading leaves of its own checkpoint."""
    specs, runs = specs_of(sent), [0]

    def probe(names: Sequence[str]) -> list[Reading]:
        runs[0] += 1
        renamed = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
        return [reading(names_read(model, renamed), names)]

    found = LoaderNames()
    try:
        found = find_names("layout", list(sent), [glob.escape(name) for name in tied], probe)
        named = dict(zip(found.names or sent, sent.values(), strict=True))
        read = names_read(model, specs_of(named)).read
        unread = [old for old, new in zip(sent, named, strict=True) if new not in read and old not in tied]
        if unread:
            raise ReshardError(f"the engine does not read {unread[0]}")
        start = functools.partial(EngineStart, specs_of(started_on))
        fill_with_garbage(model)
        replay(trace(model, specs_of(named), start), named)
    except ReshardError as error:
        return {"refused": str(error), "hint": found.hint, "runs": runs[0]}
    updated = digests(model)
    fill_with_garbage(model)
    with torch.no_grad():
        model.load_weights(iter([(n, t.clone()) for n, t in started_on.items()]))  # type: ignore[operator]
    renamed = sum(old != new for old, new in zip(found.given, found.names, strict=True))
    return {"differing": differing(updated, digests(model)), "renamed": renamed, "runs": runs[0]}


def look(architecture: Architecture, root: Path) -> dict[str, Any]:
    folder = str(root / architecture.name)
    config = json.loads(RESULTS.read_text())["architectures"].get(architecture.name, {}).get("config", ())
    try:
        write_checkpoint(str(architecture.writer), Path(folder), architecture=architecture.name, variants=config)
        weights = read_weights(folder)
        sent = states(architecture, folder, weights)
        model = built(folder, True, {"tp_size": TP, "tp_rank": TP - 1})
        return {what: outcome(model, weights, state, tied) for what, (state, tied) in sent.items()}
    except Exception as error:
        return {"cannot": said(error, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    root, only = Path(sys.argv[1]), sys.argv[2:]
    begin(TP)
    tried = [a for a in generation() if a.own and (a.name in only if only else a.kind == "multimodal")]
    for architecture, found in run_in_forks(lambda a: look(a, root), tried, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([architecture.name, found]))


if __name__ == "__main__":
    main()
