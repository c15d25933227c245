"""Looks for the names that SGLang's loaders read, in those of wrapped and of text trainers: JSON for each model.

Run as a script by test_given_names.py: SGLang chooses its code paths at import.

    given_names.py FOLDER ARCHITECTURE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examination import built
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.engine.names.search import Reading, find_names, reading
from sglang_reshard.engine.target_planning import LoaderNames
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.names_read import names_read
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.scripts import answer
from tools.oracle.replay import replay

Weights = dict[str, torch.Tensor]
TOWERS = ("visual", "vision", "audio", "multi_modal", "image_newline")
WRAPPERS = ("module.{}", "_orig_mod.{}", "base_model.model.{}", "_fsdp_wrapped_module._checkpoint_wrapped_module.{}")
TP, DEADLINE_S = 2, 400


def look(folder: str) -> dict[str, Any]:
    model, weights = built(folder, True, {"tp_size": TP, "tp_rank": TP - 1}), read_weights(folder)
    with torch.no_grad():
        model.load_weights(iter(weights.items()))  # type: ignore[operator]
    read = names_read(model, specs_of(weights)).read
    weights = {name: tensor for name, tensor in weights.items() if name in read}
    return {
        "tensors": len(weights),
        "wrapped": differences(*found_for(model, wrapped(weights)), list(weights)),
        "text": text_trainer(model, weights),
    }


def wrapped(weights: Weights) -> Weights:
    """The weights with a wrapper's prefix in turn, and `base_layer` in every other linear layer."""
    named = {}
    for number, (name, tensor) in enumerate(weights.items()):
        module, _, leaf = name.rpartition(".")
        inner = f"{module}.base_layer.{leaf}" if leaf == "weight" and number % 2 else name
        named[WRAPPERS[number % len(WRAPPERS)].format(inner)] = tensor
    return named


def text_trainer(model: torch.nn.Module, weights: Weights) -> dict[str, Any]:
    """Updates the language model under the names that it has without its towers, and leaves the towers."""
    language = {n: t * 1.5 for n, t in weights.items() if not any(tower in n for tower in TOWERS)}
    if len(language) == len(weights):
        return {}
    names = [
        name.replace("model.language_model.", "model.").replace("language_model.", "") for name in language
    ]  # both ways in which transformers has saved them
    given = dict(zip(names, language.values(), strict=True))
    found, runs = found_for(model, given)
    as_read = dict(zip(found.names or names, given.values(), strict=True))
    live = dict(model.named_parameters())
    before = {name: parameter.clone() for name, parameter in live.items()}
    program = trace(model, specs_of(as_read), may_stay=MayStay(frozen=[f"*{tower}*" for tower in TOWERS]))
    replay(program, as_read)
    after = {name: parameter.clone() for name, parameter in live.items()}
    with torch.no_grad():  # SGLang's own load of the same, in the same memory
        for name, parameter in live.items():
            parameter.copy_(before[name])
        model.load_weights(iter(language.items()))  # type: ignore[operator]
    return {
        "runs": runs,
        "renamed": sum(old != new for old, new in zip(names, found.names, strict=False)),
        "kept": len(program.kept),
        "kept changed": [n for n in program.kept if not torch.equal(after[n], before[n])],
        "not of a tower": [n for n in program.kept if not any(tower in n for tower in TOWERS)],
        "not as stock": [n for n, p in live.items() if not torch.equal(p, after[n])],
        "moved": sum(not torch.equal(after[n], before[n]) for n in before),
    }


def found_for(model: torch.nn.Module, given: Weights) -> tuple[LoaderNames, int]:
    """What an engine of this one rank finds, and how often it ran the loader."""
    specs, runs = specs_of(given), [0]

    def probe(names: Sequence[str]) -> list[Reading]:
        runs[0] += 1
        renamed = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
        return [reading(names_read(model, renamed), names)]

    return find_names("layout", list(given), (), probe), runs[0]


def differences(found: LoaderNames, runs: int, names: list[str]) -> dict[str, Any]:
    wrong = [pair for pair in zip(found.names or found.given, names, strict=False) if pair[0] != pair[1]]
    return {"runs": runs, "wrong": wrong, "found": len(found.names)}


def specs_of(weights: Weights) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:]
    choose_code_paths(TP, gpu=True)
    import_before_forks()

    def work(name: str) -> dict[str, Any]:
        write_checkpoint(name, root / name)
        return look(str(root / name))

    for name, found in run_in_forks(work, names, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([name, found]))


if __name__ == "__main__":
    main()
