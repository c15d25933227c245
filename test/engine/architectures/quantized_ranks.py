"""Updates engine ranks with weights in bfloat16, and compares them with starts on a checkpoint of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from examination import Weights, built, said, started_on
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support import blackwell
from support.checkpoints import write_weights
from support.scripts import answer
from tools.oracle.digests import digests
from tools.oracle.replay import replay

Engines = Mapping[str, Iterable[tuple[int, int]]]  # TP and EP by architecture
Backends = Mapping[str, Mapping[str, str]]  # options of SGLang
SEEDS = (0, 1, 2)  # of a start, and of an update each
DEADLINE_S = 400


def answer_for_ranks(
    root: Path,
    engines: Engines,
    backends: Backends,
    sent: Callable[[str, int], Weights],
    stored: Callable[[str, Weights], Weights],
) -> None:
    """Answers with a line of JSON for each rank: architecture, backend, TP, EP, rank, and what is wrong.

    root    has a folder with the checkpoint of each architecture
    sent    returns an update's weights, of an architecture and a seed
    stored  returns the checkpoint that the engine's quantizer makes of them
    """

    for architecture in engines:
        for seed in SEEDS:
            folder = _started_on(root, architecture, seed)
            folder.mkdir()
            (folder / "config.json").write_bytes((root / architecture / "config.json").read_bytes())
            write_weights(stored(architecture, sent(architecture, seed)), folder)

    def work(job: tuple[str, str, int, int, int]) -> list[str]:
        architecture, backend, tp, ep, rank = job
        blackwell.pretend()
        build = {"tp_size": tp, "ep_size": ep, "tp_rank": rank, **backends[backend]}
        try:
            return _complaints(root, architecture, build, sent)
        except Exception as error:
            return [said(error, str(root))]

    jobs = [
        (name, backend, tp, ep, rank)
        for name, sizes in engines.items()
        for backend in backends
        for tp, ep in sizes
        for rank in range(tp)
    ]
    for job, complaints in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, complaints]))


def set_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a quantization_config into the config of a checkpoint."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def _complaints(root: Path, architecture: str, build: dict[str, Any], sent: Callable[[str, int], Weights]) -> list[str]:
    first, *later = SEEDS
    start = {"weights": str(_started_on(root, architecture, first))}
    model, complaints = built(str(root / architecture), True, build | start), []
    for seed in later:
        weights = sent(architecture, seed)
        specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
        replay(trace(model, specs), weights)
        found = digests(model)
        stock = digests(started_on(_started_on(root, architecture, seed)))
        complaints += [f"seed {seed}: {name} differs" for name in stock if found.get(name) != stock[name]][:3]
        complaints += [f"seed {seed}: {path}'s dispatcher has another scale" for path in _misled(model)]
    return complaints


def _misled(model: torch.nn.Module) -> list[str]:
    """Returns the paths of experts in NVFP4 that quantize what they dispatch with another scale than the live one."""
    return [
        path
        for path, module in model.named_modules()
        if (scale := getattr(module, "w13_input_scale_quant", None)) is not None
        and module.dispatcher.quant_config["input_global_scale"] is not scale
    ]


def _started_on(root: Path, architecture: str, seed: int) -> Path:
    return root / f"{architecture}-{seed}"


def randomized(like: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).to(torch.bfloat16) for name, t in like.items()}
