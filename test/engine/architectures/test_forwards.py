"""After an update an engine computes what an engine computes that has started on the same checkpoint.

Engines of SGLang's CPU code paths run a forward pass on checkpoint A, are updated to B, and run another. Logits and
every tensor that the model reaches are compared bit for bit with those of an engine that has loaded B by stock, in the
checkpoint's dtype. `make test` tries a few; `make test-all` tries all, and writes benchmark/results/forwards.json and
its column of docs/results/architectures.md.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import architecture_results as results
from architecture_cases import USUAL
from architectures import Architecture, generation
from examination import said, specs_of
from rank_jobs import run_jobs
from sglang_reshard.cli.plan.sglang_model import publish_arguments
from sglang_reshard.cli.plan.worker_process import run_in_forks
from sglang_reshard.derived import DerivedState
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest.digests import digest
from sglang_reshard.testing import cpu_host
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support import sglangs
from support.checkpoints import read_weights, write_checkpoint
from support.reachable_state import reachable_state
from tools.oracle.replay import replay

PROMPTS = [[5, 6, 7, 8, 9, 10], [100, 200, 30, 40, 50, 60]]
A, B = 1, 2  # seeds of checkpoints
# Changes to the usual config, until SGLang's CPU code runs it: its latent attention runs where the latent cache is as
# wide as heads.
_CONFIGS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"kv_lora_rank": 32, "qk_nope_head_dim": 32}, ()),
    ({}, ()),
    *(({}, variants) for variants in USUAL if variants),
)


class Run(NamedTuple):
    """`kind` of one engine rank by SGLang's own ModelRunner in the checkpoint's dtype, with the plugin.

    fresh      loads checkpoint B by stock, and runs a prefill and a decode step, twice
    again      the same: what differs from `fresh` is of the run and not of the weights
    updated    loads checkpoint A by stock, runs both steps, is updated to B, and runs them again
    in place   like `updated`, as where CUDA graphs hold addresses
    unrenewed  like `updated`, but what forward passes have derived from weights stays
    """

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
    specs = specs_of(weights)
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


def language_models() -> list[tuple[str]]:
    return [(one.name,) for one in generation() if one.kind == "text" and one.writer is not None]


def load_plugin(_: Path) -> None:
    from sglang.srt.plugins import load_plugins

    _bench()  # imported before forks
    load_plugins()


def examined(root: Path, name: str) -> dict[str, Any]:
    """Runs in a child; each of its runs in a fork of it."""
    (architecture,) = (one for one in generation() if one.name == name)
    reasons: list[str] = []
    refused: dict[str, Any] | None = None
    for folders in _written(architecture, root):
        fresh = _in_fork(run, Run("fresh", folders))
        if fresh.error:
            reasons.append(fresh.error)
            continue
        if not fresh.finite:
            reasons.append("logits that are no finite numbers")
            continue
        again, updated, in_place, unrenewed = (
            _in_fork(run, Run(kind, folders)) for kind in ("again", "updated", "in place", "unrenewed")
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


SWEEP = "SGLANG_RESHARD_SWEEP" in os.environ
# One that caches its router's weight in float32, and one with post_load_weights.
FEW = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
SECONDS = 3000 if SWEEP else 1500

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * SECONDS + 100)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    def cases(folder):
        jobs = language_models if SWEEP else [(name,) for name in FEW]
        return dict(run_jobs(examined, jobs, folder, before=load_plugin, ranks=1, gpu=False, deadline_s=SECONDS))

    of_pinned = cases(tmp_path_factory.mktemp("forwards"))
    if SWEEP:
        with sglangs.chosen("newest"):
            of_newest = cases(tmp_path_factory.mktemp("newest"))
        results.save_forwards(of_pinned, of_newest)
        results.write_table()
    return of_pinned


@pytest.mark.parametrize("architecture", FEW)
def test_it_computes_what_a_fresh_engine_computes(found, architecture):
    assert found[architecture]["outcome"] == "passed", found[architecture]


def test_derived_state_is_found_and_matters(found):
    case = found["Glm4MoeForCausalLM"]
    assert case["needed"]
    assert [path.rpartition(".")[2] for path in case["derived"]] == ["_weight_fp32"] * 3
    assert not found["DeepseekV3ForCausalLM"]["derived"]


@pytest.mark.skipif(not SWEEP, reason="all architectures: make test-all")
def test_none_fails(found):
    assert {name: case["why"] for name, case in found.items() if case["outcome"] == "failed"} == {}
    assert {name: case["left"] for name, case in found.items() if case.get("left")} == {}


def test_what_was_saved_has_no_failure():
    for saved in (results.saved_forwards(), results.saved_forwards("newest")):
        assert {name: case["why"] for name, case in saved.items() if case["outcome"] == "failed"} == {}
        assert {name: case["left"] for name, case in saved.items() if case.get("left")} == {}
        assert sum(case["outcome"] == "passed" for case in saved.values()) >= 30
        assert all(case["in place"] == "passed" for case in saved.values() if case["outcome"] == "passed")


def test_a_stale_tensor_and_a_blind_comparison_are_told():
    fresh = Seen(("1", "2"), True, {"w": "1", "w32": "1"})
    right = Seen(("1", "2"), True, {"w": "1", "w32": "1"}, first=("0", "0"))
    assert verdict(fresh, right, right)["outcome"] == "passed"
    assert verdict(fresh, Seen(("1", "0"), True, right.reachable, ("0", "0")), right)["outcome"] == "failed"
    stale = verdict(fresh, Seen(fresh.logits, True, {"w": "1", "w32": "0"}, ("0", "0")), right)
    assert (stale["outcome"], "w32" in stale["why"]) == ("failed", True)
    left_behind = verdict(fresh, Seen(fresh.logits, True, right.reachable | {"more": "1"}, ("0", "0")), right)
    assert (left_behind["outcome"], "more" in left_behind["why"]) == ("failed", True)
    assert verdict(fresh, Seen(fresh.logits, True, right.reachable, fresh.logits), right)["outcome"] == "cannot"
