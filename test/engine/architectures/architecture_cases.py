"""Tries architectures one engine rank at a time, and answers with a line of JSON for each that is done.

Run as a script by test_architectures.py: SGLang chooses between GPU and CPU code paths at import, so
each kind needs a process of its own, and each rank a fork of it.

    architecture_cases.py gpu|cpu fast|sweep FOLDER [ARCHITECTURE ...]
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from architectures import Architecture, generation
from examination import Finding, begin, examine, said
from sglang_reshard.cli.plan.worker_process import run_in_forks
from support.checkpoints import has_experts, write_checkpoint
from support.scripts import answer

ARCHITECTURE, CASE = "architecture: ", "case: "
RESULTS = Path(__file__).parents[3] / "benchmark" / "results" / "architectures.json"
# Variants of the config: the first that passes is the usual one, the first that is refused if none does.
USUAL = ((), ("ungrouped",), ("biases",))
_DEADLINE_SECONDS = 7200  # of a sweep, on two cores that do other work as well
_EVERY = 3  # of the language models, which plain `make test` tries with the runs that are not for all

Job = TypeVar("Job")


class Run(NamedTuple):
    """An engine that each architecture is tried with.

    variant  of the usual checkpoint
    fast     the engine ranks that plain `make test` tries, one pipeline stage after the other
    always   these of all architectures that it tries; else of one language model in _EVERY
    """

    name: str
    tp_size: int = 2
    ep_size: int = 1
    pp_size: int = 1
    variant: str | None = None
    fp8: bool = False
    weights_dtype: str | None = None
    gpu: bool = True
    fast: tuple[int, ...] = ()
    always: bool = False


RUNS = (
    Run("tp 1", tp_size=1),
    Run("tp 2", tp_size=2),
    Run("tp 4", tp_size=4, fast=(3,), always=True),
    # Eight heads for three ranks: the CPU code path pads them, the others refuse.
    Run("tp 3, CPU", tp_size=3, gpu=False, fast=(2,)),
    Run("ep 2", tp_size=4, ep_size=2, fast=(3,)),
    Run("pp 2", tp_size=1, pp_size=2, fast=(1,)),
    Run("float32", weights_dtype="float32"),
    Run("biases", variant="biases"),
    Run("tying", variant="tied"),
    Run("block-fp8", fp8=True, fast=(1,)),
)


class Case(NamedTuple):
    """One engine rank of one run of one architecture."""

    architecture: str
    run: str
    rank: int


class Checkpoint(NamedTuple):
    architecture: Architecture
    variants: tuple[str, ...]
    fp8: bool = False

    def folder(self, root: Path) -> Path:
        return root / self.architecture.name / "-".join((*self.variants, "fp8" if self.fp8 else "plain"))

    def written(self, root: Path) -> str | None:
        """Its folder; None when there is no such variant, or transformers does not take it."""
        assert self.architecture.writer is not None
        return write_checkpoint(
            self.architecture.writer,
            self.folder(root),
            architecture=self.architecture.name,
            variants=self.variants,
            fp8=self.fp8,
        )


def _forked(work: Callable[[Job], Any], jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    return run_in_forks(work, jobs, processes=2, deadline_seconds=_DEADLINE_SECONDS)


def _usual(
    architectures: Sequence[Architecture], root: Path, probe: Run | None
) -> dict[Architecture, tuple[tuple[str, ...], str]]:
    """The usual variants of each architecture's config, or why there is no checkpoint.

    probe  None: they are what the last sweep has found
    """

    def tried(checkpoint: Checkpoint) -> tuple[str, str]:
        try:
            path = checkpoint.written(root)
        except Exception as error:
            return "unwritten", said(error, str(root))
        if path and probe is None:
            return "passed", ""
        draft = checkpoint.architecture.is_draft
        return (_examined(probe, 0, path, draft).outcome, "") if path else ("unwritten", "there is no such variant")

    outcomes: dict[Architecture, dict[str, tuple[str, ...]]] = {a: {} for a in architectures}
    reasons: dict[Architecture, str] = {}
    known = {} if probe else json.loads(RESULTS.read_text())["architectures"]
    for variants in USUAL:
        jobs = [Checkpoint(a, variants) for a in architectures if "passed" not in outcomes[a]]
        if probe is None:
            jobs = [job for job in jobs if variants == tuple(known.get(job.architecture.name, {}).get("config", ()))]
        for (architecture, *_), (outcome, why) in _forked(tried, jobs):
            outcomes[architecture].setdefault(outcome, variants)
            reasons.setdefault(architecture, why)
    chosen = {a: o.get("passed", o.get("refused", o.get("cannot"))) for a, o in outcomes.items()}
    return {a: ((), reasons.get(a, "")) if variants is None else (variants, "") for a, variants in chosen.items()}


def _applying(run: Run, architecture: Architecture, usual: tuple[str, ...], config: dict[str, Any]) -> bool:
    if run.pp_size > 1 and architecture.is_draft:
        return False  # SGLang has no pipeline with speculative decoding
    if run.fp8 and not architecture.has_blocks:
        return False
    return run.variant not in usual and (run.ep_size == 1 or has_experts(config))


def _examined(run: Run, rank: int, path: str, draft: bool) -> Finding:
    stage, tp_rank = divmod(rank, run.tp_size)
    return examine(
        path,
        weights_dtype=run.weights_dtype,
        gpu=run.gpu,
        draft=draft,
        tp_size=run.tp_size,
        tp_rank=tp_rank,
        ep_size=run.ep_size,
        pp_size=run.pp_size,
        pp_rank=stage,
    )


def _cases(
    usual: dict[Architecture, tuple[tuple[str, ...], str]], runs: Sequence[Run], root: Path, fast: bool
) -> Iterator[tuple[Case, str, bool]]:
    checkpoints: dict[tuple[Architecture, Run], Checkpoint] = {}
    others = 0  # language models so far
    for architecture, (variants, why) in usual.items():
        if why:
            continue
        others += architecture.kind == "text"
        is_one = architecture.kind == "text" and others % _EVERY == 1
        config = json.loads((Checkpoint(architecture, variants).folder(root) / "config.json").read_text())
        for run in runs:
            left_out = fast and not is_one and not run.always
            if not left_out and _applying(run, architecture, variants, config):
                extra = (run.variant,) if run.variant else ()
                checkpoints[architecture, run] = Checkpoint(architecture, variants + extra, run.fp8)

    def write(checkpoint: Checkpoint) -> str | None:
        try:
            return checkpoint.written(root)
        except Exception:
            # transformers refuses what its own config can say: some models are never tied.
            return None

    plain = {Checkpoint(a, variants) for a, (variants, _) in usual.items()}
    paths = {c: str(c.folder(root)) for c in plain}
    paths |= dict(_forked(write, [c for c in dict.fromkeys(checkpoints.values()) if c not in plain]))
    for (architecture, run), checkpoint in checkpoints.items():
        path = paths[checkpoint]
        if path is not None:
            for rank in run.fast if fast else range(run.tp_size * run.pp_size):
                yield Case(architecture.name, run.name, rank), path, architecture.is_draft


def main(paths: str, level: str, folder: str, *only: str) -> None:
    gpu, fast = paths == "gpu", level == "fast"
    begin(4, gpu=gpu)

    runs = {r.name: r for r in RUNS if r.gpu == gpu and (r.fast or not fast)}
    probe = None if fast else Run("probe", tp_size=2 if gpu else 3, gpu=gpu)
    architectures = generation()
    tried = [a for a in architectures if a.writer and (not only or a.name in only)]
    usual = _usual(tried, Path(folder), probe)
    for architecture in architectures:
        line = [architecture.name, architecture.kind, architecture.writer, architecture.own]
        line += usual.get(architecture, ((), ""))
        answer(ARCHITECTURE + json.dumps(line))
    jobs = list(_cases(usual, list(runs.values()), Path(folder), fast))
    for (case, *_), found in _forked(lambda job: _examined(runs[job[0].run], job[0].rank, *job[1:]), jobs):
        answer(CASE + json.dumps([case, dataclasses.asdict(found)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
