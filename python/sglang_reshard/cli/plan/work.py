"""The work, in a fresh process: SGLang chooses its code paths when it is imported, and a process is one rank only.

Every engine rank is built, traced and planned for in a fork of its own, then all of them together are given to the
functions that engine ranks call to choose and to plan.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_reshard.cli.plan import worker_process
from sglang_reshard.cli.plan.checkpoint import specs_of
from sglang_reshard.cli.plan.figures import EngineRank, Forecast, Gather, TrainerRank, Way
from sglang_reshard.cli.plan.forked_jobs import in_forks
from sglang_reshard.cli.plan.loads import EngineLoad, engine_load, largest_tensor_bytes
from sglang_reshard.cli.plan.rank_model import Outline, Refusal, look
from sglang_reshard.cli.plan.request import PlanRequest
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.cli.plan.sources import layout_of
from sglang_reshard.engine.context import refusal
from sglang_reshard.engine.unused_names import check_used, remark
from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.plan import ClusterTopology, RankDemand, Strategy, TensorIndex, choose_strategy, unread_tensors
from sglang_reshard.transports.p2p import buckets_bytes

STEPS = ("import SGLang", "build, trace and take in", "choose", "cut messages")


class _Clock:
    """Tells the other process what is begun and done, and keeps the seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._step, self._began = "", time.perf_counter()

    def begin(self, step: str, of: int = 1) -> None:
        self.end()
        self._step = step
        worker_process.answer({"step": step, "of": of})

    def advance(self) -> None:
        worker_process.answer({"done": 1})

    def end(self) -> None:
        now = time.perf_counter()
        if self._step:
            self.seconds[self._step] = round(now - self._began, 3)
        self._step, self._began = "", now


def serve() -> None:
    """The fresh process."""
    question = msgspec.convert(worker_process.given(), PlanRequest)
    try:
        worker_process.answer({"forecast": msgspec.to_builtins(forecast(question))})
    except DeadlineExceeded as error:
        print(error, file=sys.stderr)
        sys.exit(worker_process.TOO_LATE)
    except ReshardError as error:
        worker_process.answer({"error": str(error)})


def forecast(question: PlanRequest) -> Forecast:
    """The answer. Raises Mismatch and Unsupported for a question that there is none to."""
    clock = _Clock()
    clock.begin(STEPS[0])
    choose_code_paths(question.target.tp, gpu=question.device == "cuda")
    torch.set_num_threads(1)
    import_before_forks()
    layout = layout_of(specs_of(Path(question.folder)), question.source)
    catalog = TensorIndex.of(layout)
    clock.begin(STEPS[1], question.target.tp)
    cores = len(os.sched_getaffinity(0))
    outlines, refused = _engine_ranks(question, catalog, cores, clock)
    known = {
        "question": question,
        "tensors": len(layout.tensors),
        "model_bytes": sum(t.spec.nbytes for t in layout.tensors),
        "layout_pieces": catalog.pieces,
    }
    if refused:
        return _told(clock, known | {"refused": refused})
    clock.begin(STEPS[2])
    needs = [outline.needs for outline in outlines]
    setting = _setting(question, needs)
    unused = unread_tensors(catalog, needs)
    try:
        check_used(unused, question.ignore)
        choice = choose_strategy(question.transport, catalog, needs, setting, question.bucket_bytes)
    except ReshardError as error:
        return _told(clock, known | {"refused": (refusal("plan", range(question.target.tp), str(error)),)})
    ways = [_way(name, question, catalog, needs, setting) for name in ("ipc", "p2p", "broadcast")]
    clock.begin(STEPS[3], question.target.tp)
    loads = _loads(question, catalog, choice, outlines, clock)
    return _told(
        clock,
        known | _figures(question, catalog, needs, choice, loads) | {"ways": tuple(ways), "remark": remark(unused)},
    )


def _told(clock: _Clock, known: dict[str, Any]) -> Forecast:
    clock.end()
    return Forecast(**known, seconds_by_step=clock.seconds)


def _engine_ranks(
    question: PlanRequest, catalog: TensorIndex, cores: int, clock: _Clock
) -> tuple[list[Outline], tuple[str, ...]]:
    """All engine ranks in order, or why some are refused, in the words that the trainer would hear."""
    found: dict[int, Outline | Refusal] = {}
    work = partial(look, question, catalog, cores)
    jobs = range(question.target.tp)
    for rank, outline in in_forks(work, jobs, processes=question.processes, deadline_seconds=question.deadline_seconds):
        found[rank] = outline
        clock.advance()
    refusals = {rank: of for rank in jobs if isinstance(of := found[rank], Refusal)}
    if not refusals:
        return [of for rank in jobs if isinstance(of := found[rank], Outline)], ()
    said = refusals[min(refusals)]
    return [], (refusal(said.phase, sorted(refusals), said.reason) if said.phase else said.reason,)


def _setting(question: PlanRequest, needs: Sequence[RankDemand]) -> ClusterTopology:
    """Hosts by rank, and the cost model with the links' speeds put in."""
    setting = ClusterTopology.of(needs, question.trainer_hosts, question.device)
    local, network = question.links
    costs = replace(
        setting.costs,
        local_bytes_s=local or setting.costs.local_bytes_s,
        network_bytes_s=network or setting.costs.network_bytes_s,
    )
    return replace(setting, costs=costs)


def _way(
    name: str, question: PlanRequest, catalog: TensorIndex, needs: Sequence[RankDemand], setting: ClusterTopology
) -> Way:
    try:
        return Way(name, choose_strategy(name, catalog, needs, setting, question.bucket_bytes).seconds)
    except ReshardError as error:
        return Way(name, refused=str(error))


def _loads(
    question: PlanRequest, catalog: TensorIndex, choice: Strategy, outlines: Sequence[Outline], clock: _Clock
) -> list[EngineLoad]:
    found: dict[int, EngineLoad] = {}

    def work(rank: int) -> EngineLoad:
        return engine_load(catalog, choice, rank, outlines[rank].seated())

    jobs = range(len(outlines))
    for rank, load in in_forks(work, jobs, processes=question.processes, deadline_seconds=question.deadline_seconds):
        found[rank] = load
        clock.advance()
    return [found[rank] for rank in jobs]


def _figures(
    question: PlanRequest,
    catalog: TensorIndex,
    needs: Sequence[RankDemand],
    choice: Strategy,
    loads: Sequence[EngineLoad],
) -> dict[str, Any]:
    engine_ranks = tuple(
        EngineRank(rank, host, load.received, need.least_bytes, load.extra, load.messages)
        for rank, (host, need, load) in enumerate(zip(question.engine_hosts, needs, loads, strict=True))
    )
    held = catalog.layout.local_bytes()
    trainer_ranks, link_bytes = [], []
    for rank, host in enumerate(question.trainer_hosts):
        sent = [load.sent[rank][1] for load in loads if rank in load.sent]
        links = [load.sent[rank][1].payload_bytes if rank in load.sent else load.read.get(rank, 0) for load in loads]
        messages = sum(load.messages for load in sent)
        trainer_ranks.append(TrainerRank(rank, host, held[rank], sum(links), buckets_bytes(sent), messages))
        link_bytes.append(tuple(links))
    model_bytes = sum(t.spec.nbytes for t in catalog.layout.tensors)
    return {
        "transport": choice.name,
        "transport_reason": choice.why,
        "predicted_seconds": choice.seconds,
        "engine_ranks": engine_ranks,
        "trainer_ranks": tuple(trainer_ranks),
        "link_bytes": tuple(link_bytes),
        "gather": Gather(model_bytes - min(held), model_bytes, largest_tensor_bytes(catalog)),
        "messages": sum(load.messages for load in loads),
    }
