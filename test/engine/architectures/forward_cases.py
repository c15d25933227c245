"""Forward passes of engines that were updated, and of engines that started on the same checkpoint.

Run as a script by test_forwards.py, on SGLang's CPU code paths. One engine rank per fork, by SGLang's own ModelRunner
in the checkpoint's dtype, with the plugin:

    fresh      loads checkpoint B by stock, and runs a prefill and a decode step, twice
    again      the same: what differs from `fresh` is of the run and not of the weights
    updated    loads checkpoint A by stock, runs both steps, is updated to B, and runs them again
    in place   like `updated`, as where CUDA graphs hold addresses
    unrenewed  like `updated`, but what forward passes have derived from weights stays

    forward_cases.py FOLDER [ARCHITECTURE ...]
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from architecture_cases import USUAL
from architectures import Architecture, generation
from examination import said
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import publish_arguments
from sglang_reshard.derived import DerivedState
from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.testing import cpu_host
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.reachable_state import reachable_state
from support.scripts import answer
from tools.oracle.digests import digest
from tools.oracle.replay import replay

CASE = "case: "
PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 200, 30, 40, 50, 60]]
A, B = 1, 2  # seeds of checkpoints
_DEADLINE_SECONDS = 3000
# Changes to the usual config, until SGLang's CPU code runs it: its latent attention runs where the latent cache is as
# wide as heads.
_CONFIGS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"kv_lora_rank": 32, "qk_nope_head_dim": 32}, ()),
    ({}, ()),
    *(({}, variants) for variants in USUAL if variants),
)


class Run(NamedTuple):
    architecture: str
    kind: str
    folders: tuple[str, str]


@dataclass(frozen=True)
class Seen:
    """What a run has computed with checkpoint B, and what the model keeps afterwards.

    logits     digests of a prefill's and a decode step's
    finite     whether all logits are finite numbers
    reachable  digests of all tensors and numbers that the model reaches, by path
    first      `logits`, with checkpoint A
    derived    paths of what was computed again
    remark     what nobody knows about
    error      of a run that has come to no end
    alone      parameters that a start on the checkpoint leaves as they are, and so does the update
    """

    logits: tuple[str, ...] = ()
    finite: bool = True
    reachable: dict[str, str] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    remark: str = ""
    error: str = ""
    alone: tuple[str, ...] = ()


def run(job: Run) -> Seen:
    try:
        return _run(job)
    except ReshardError as error:
        return Seen(error=str(error))
    except (Exception, SystemExit) as error:
        return Seen(error=said(error, str(Path(job.folders[0]).parent)))


def _run(job: Run) -> Seen:
    at_a, at_b = job.folders
    if job.kind in ("fresh", "again"):
        runner = _runner(at_b)
        _forward(runner)
        logits, finite = _forward(runner)
        return Seen(logits, finite, reachable_state(runner.torch_runner.model))
    runner = _runner(at_a)
    model = runner.torch_runner.model
    first, _ = _forward(runner)
    derived = DerivedState(model, addresses_stay=job.kind == "in place")
    derived.signature()
    weights = read_weights(at_b)
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    start = functools.partial(EngineStart, specs)
    if job.kind == "unrenewed":
        _forward(runner)
    program = trace(model, specs, start)
    replay(program, weights, None if job.kind == "unrenewed" else derived)
    logits, finite = _forward(runner)
    again = tuple(lazy.path for lazy in derived._found.lazy)
    return Seen(logits, finite, reachable_state(model), first, again, derived.remark, alone=program.left_alone)


def _runner(folder: str) -> Any:
    from sglang.srt.server_args import PortArgs, ServerArgs

    bench = _bench()
    dtype = json.loads((Path(folder) / "config.json").read_text()).get("dtype", "bfloat16")
    arguments = cpu_host.engine_arguments(dtype=dtype)
    server_args = ServerArgs(model_path=folder, skip_tokenizer_init=True, log_level="error", **arguments)
    bench.get_tokenizer = lambda *_, **__: None
    publish_arguments(server_args, 0, 0)
    getattr(bench, "_init_process_global_configs", bool)()
    torch.manual_seed(0)
    return bench.load_model(server_args, PortArgs.init_new(server_args), 0, 0)[0]


def _bench() -> Any:
    """SGLang's benchmark of one batch, which runs a model without a scheduler."""
    try:
        return importlib.import_module("sglang.benchmark.one_batch")
    except ModuleNotFoundError:  # before 0.5.20
        return importlib.import_module("sglang.bench_one_batch")


def _forward(runner: Any) -> tuple[tuple[str, ...], bool]:
    runner.clear()
    requests = _bench().prepare_synthetic_inputs_for_latency_test(len(PROMPTS), len(PROMPTS[0]), PROMPTS)
    tokens, prefill, batch = runner.extend(requests)
    _, decode = runner.decode(tokens, batch)
    return (digest(prefill), digest(decode)), bool(prefill.isfinite().all() and decode.isfinite().all())


def _written(architecture: Architecture, root: Path) -> Iterator[tuple[str, str]]:
    """Yields the folders of both checkpoints, for one config after the other that transformers takes."""
    assert architecture.writer is not None
    tried: list[dict[str, Any]] = []
    for number, (instead, variants) in enumerate(_CONFIGS):
        folders = [root / architecture.name / f"{number}-{seed}" for seed in (A, B)]
        try:
            for folder, seed in zip(folders, (A, B), strict=True):
                write_checkpoint(
                    architecture.writer,
                    folder,
                    architecture=architecture.name,
                    variants=variants,
                    instead=instead,
                    seed=seed,
                )
        except Exception:
            continue
        if not (folders[0] / "config.json").exists():
            continue  # there is no such variant
        config = json.loads((folders[0] / "config.json").read_text())
        if config not in tried:  # keys that a class does not have change nothing
            tried.append(config)
            yield str(folders[0]), str(folders[1])


def examine(architecture: Architecture, root: Path) -> dict[str, Any]:
    """Runs in a child; each of its runs in a fork of it."""
    reasons: list[str] = []
    refused: dict[str, Any] | None = None
    for folders in _written(architecture, root):
        fresh = _in_fork(run, Run(architecture.name, "fresh", folders))
        if fresh.error:
            reasons.append(fresh.error)
            continue
        if not fresh.finite:
            reasons.append("logits that are no finite numbers")
            continue
        again, updated, in_place, unrenewed = (
            _in_fork(run, Run(architecture.name, kind, folders))
            for kind in ("again", "updated", "in place", "unrenewed")
        )
        same = {name for name, digest in fresh.reachable.items() if again.reachable.get(name) == digest}
        noise = (fresh.reachable.keys() | again.reachable.keys()) - same
        fresh, updated, in_place = (_without(noise, one) for one in (fresh, updated, in_place))
        found = verdict(fresh, updated, unrenewed)
        where_they_stay = verdict(fresh, in_place, unrenewed)
        found["in place"] = where_they_stay["outcome"]
        if where_they_stay["outcome"] == "failed":
            found |= where_they_stay
        if found["outcome"] != "refused":
            return found
        refused = refused or found
    return refused or {"outcome": "cannot", "why": next(iter(reasons), "no checkpoint could be written")}


def _without(noise: Collection[str], seen: Seen) -> Seen:
    return replace(seen, reachable={name: digest for name, digest in seen.reachable.items() if name not in noise})


def verdict(fresh: Seen, updated: Seen, unrenewed: Seen) -> dict[str, Any]:
    """Compares an updated engine with a fresh one.

    needed  whether the engine computes something else if derived state is left as it was
    """
    differing = [n for n, d in fresh.reachable.items() if updated.reachable.get(n) != d]
    differing += sorted(updated.reachable.keys() - fresh.reachable.keys())
    if updated.error:
        outcome, why = "refused", updated.error
    elif updated.alone and updated.logits != fresh.logits:
        outcome, why = "cannot", f"logits that depend on {updated.alone[0]}, which SGLang's loader does not write"
    elif updated.first == fresh.logits:
        outcome, why = "cannot", "logits that are the same for all weights"
    elif updated.logits != fresh.logits:
        outcome, why = "failed", f"other logits than a fresh engine's; {len(differing)} tensors differ: {differing[:3]}"
    elif differing:
        outcome, why = "failed", f"{len(differing)} reachable tensors differ: {', '.join(differing[:3])}"
    else:
        outcome, why = "passed", ""
    needed = unrenewed.logits != fresh.logits
    return {"outcome": outcome, "why": why, "derived": list(updated.derived), "needed": needed, "left": updated.remark}


def _in_fork(work: Callable[[Any], Any], job: Any) -> Any:
    ((_, result),) = run_in_forks(lambda _: asdict(work(job)), [0], processes=1, deadline_seconds=300)
    return Seen(**{k: tuple(v) if isinstance(v, list) else v for k, v in result.items()})


def main(folder: str, *only: str) -> None:
    cpu_host.activate(1, 1)
    torch.set_num_threads(1)
    _bench()  # imported before forks
    from sglang.srt.plugins import load_plugins

    load_plugins()
    architectures: Sequence[Architecture] = [
        a for a in generation() if a.kind == "text" and a.writer is not None and (not only or a.name in only)
    ]
    jobs = run_in_forks(
        lambda architecture: examine(architecture, Path(folder)),
        architectures,
        processes=2,
        deadline_seconds=_DEADLINE_SECONDS,
    )
    for architecture, found in jobs:
        answer(CASE + json.dumps([architecture.name, found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
