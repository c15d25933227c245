"""What the trainer ranks of test_stock_paths.py do: SGLang's own updates, pauses and cache, around ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmark.reference import greedy_tokens
from flights import GREEDY, Flight
from reshard_job import Job
from sglang_reshard.selftest import text
from stock_steps import all_steps
from support.checkpoints import write_checkpoint
from support.live_engines import PROMPTS, stock_engine

LONG = [[(7 * i) % 400 + 3 for i in range(40)]]  # long enough for its beginning to be cached
IN_FLIGHT = 150  # new tokens of a request that is served while weights change: seconds, and a pause comes at the first


# -- SGLang's own updates


def without_the_plugin(job: dict[str, Any]) -> dict[str, Any]:
    """The steps of an engine that does not load the package's plugin."""
    folder, weights = Path(job["folder"]), Path(job["weights"])
    for name in ("checkpoint-1", "checkpoint-2"):
        (folder / name).symlink_to(weights / name)
    with started(job, weights / "model") as engine:
        return all_steps(engine, folder, "without")


def steps_of_a_model(job: dict[str, Any]) -> dict[str, Any]:
    """The steps alone, of a model of another class."""
    folder = Path(job["folder"])
    for version in (1, 2):
        write_checkpoint(job["writer"], folder / f"checkpoint-{version}", seed=version)
    with started(job, folder / "checkpoint-1", skip_tokenizer_init=True) as engine:
        return all_steps(engine, folder, "alone")


@contextmanager
def started(job: dict[str, Any], model: Path, **options: Any) -> Iterator[Any]:
    """An engine that SGLang itself starts, with the package's plugin or without it."""
    sizes = {"tp_size": job["target_tp"], "dtype": job["dtype"]}
    with stock_engine(model, load_format="dummy", **sizes, **options) as engine:
        assert hasattr(engine, "update_weights_distributed") == job["plugin"]
        yield engine


# -- requests in flight, and the cache


def pauses(run: Job, first: Any) -> dict[str, Any]:
    """An update to weights 2 while a request of weights 1 is paused in each of SGLang's modes."""
    seen: dict[str, Any] = {}
    for mode in ("abort", "retract", "in_place"):
        to_weights(run, "1")
        flight = Flight(first, PROMPTS[0], IN_FLIGHT) if first else None
        had = flight.pause(mode) if flight else 0
        refusal = to_weights(run, "2", refused=mode == "in_place")
        if mode == "in_place":
            to_weights(run, "2", flush_cache=False)
        seen[mode] = {"had": had, "refusal": refusal, **(flight.go_on() if flight else {})}
        seen[mode]["after"] = run.tokens()
    return seen


def cache(run: Job, first: Any) -> dict[str, Any]:
    """A long prompt before and after an update that flushes, one that does not, and two that keep versions apart.

    The second of these finds a request that is paused in place.
    """

    def ask() -> list[Any]:
        if first is None:
            return []
        (out,) = first.generate(input_ids=LONG, sampling_params={**GREEDY, "max_new_tokens": text.NEW_TOKENS})
        return [out["meta_info"]["cached_tokens"], out["output_ids"]]

    to_weights(run, "1")
    seen = {"cold": ask(), "warm": ask()}
    to_weights(run, "2")
    seen["after"] = ask()
    to_weights(run, "1", flush_cache=False)
    seen["without a flush"] = ask()
    to_weights(run, "2", flush_cache="by_version")
    seen["by version"] = [ask(), ask()]
    flight = Flight(first, LONG[0], IN_FLIGHT) if first else None
    had = flight.pause("in_place") if flight else 0
    to_weights(run, "1", flush_cache="by_version")
    flown = flight.go_on() if flight else {}
    seen["beside one in place"] = [had, flown, ask(), ask()]
    return seen


def to_weights(run: Job, version: str, *, refused: bool = False, **options: Any) -> list[str]:
    """One of our updates, to the trainer's weights of that version."""
    named = run.states[version].items()
    if refused:
        return run.refusal(None, named=named, **options)
    run.engine.update_weights_from_tensor(named, **options)
    return []


# -- all of it


def around_our_updates(job: dict[str, Any]) -> dict[str, Any]:
    """SGLang's own updates between two of ours, then pauses and the cache."""
    run = Job(job)
    run.states = {}
    for version in ("1", "2"):
        run.step_and_save(version)
        run.states[version] = {n: p.detach().clone() for n, p in run.trainer.model.named_parameters()}
    first = run.engine.engine
    seen: dict[str, Any] = {}
    to_weights(run, "2")
    seen["ours before"] = run.live_digests("ours-before")
    seen["steps"] = all_steps(first, run.folder, "with") if first else {}
    dist.barrier()
    to_weights(run, "2")
    seen["ours after"] = run.live_digests("ours-after")
    seen["pauses"] = pauses(run, first)
    seen["cache"] = cache(run, first)
    seen["expected"] = {v: run.expected_tokens(v) for v in ("1", "2")} if first else {}
    if first:
        seen["long"] = {v: greedy_tokens(run.checkpoint(v), LONG, text.NEW_TOKENS, "float32")[0][0] for v in ("1", "2")}
        retracted = seen["pauses"]["retract"]
        had, tokens = retracted["had"], retracted["tokens"]
        old = greedy_tokens(run.checkpoint("1"), [PROMPTS[0]], had, "float32")[0][0]
        new = greedy_tokens(run.checkpoint("2"), [PROMPTS[0] + tokens[:had]], len(tokens) - had, "float32")[0][0]
        seen["retracted"] = old + new
    run.engine.shutdown()
    return seen
