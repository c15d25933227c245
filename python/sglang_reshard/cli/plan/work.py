"""Makes the plan, in a worker process: SGLang chooses its code paths at import, and a process can be one rank only.

Every engine rank is built, traced and planned for in a separate fork. The functions that choose a strategy for engine
ranks then get the results of all forks.
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
from sglang_reshard.cli.plan.cost import Costs, predicted_seconds, usual_costs
from sglang_reshard.cli.plan.figures import Communicator, EngineRank, Forecast, Gather, TrainerRank, Way
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.loads import EngineLoad, buckets_bytes, engine_load, largest_tensor_bytes
from sglang_reshard.cli.plan.rank_model import START, Outline, Refusal, model_rank
from sglang_reshard.cli.plan.request import PlanRequest
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.cli.plan.sizing import Sizing, engine_sizing, trainer_sizings
from sglang_reshard.cli.plan.sources import layout_of
from sglang_reshard.engine.context import failure_message
from sglang_reshard.engine.unread import check_unread
from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.layout.names import matches_any
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex, unread_tensors
from sglang_reshard.routes.choice import choose_strategy
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.sources.names import ignored_remark

STEPS = ("import SGLang", "build, trace and take in", "choose", "cut messages")


class _Clock:
    """Reports progress to the parent process, and records the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._step, self._began = "", time.perf_counter()

    def begin(self, step: str, of: int = 1) -> None:
        self.end()
        self._step = step
        worker_process.report({"step": step, "of": of})

    def advance(self) -> None:
        worker_process.report({"done": 1})

    def end(self) -> None:
        now = time.perf_counter()
        if self._step:
            self.seconds[self._step] = round(now - self._began, 3)
        self._step, self._began = "", now


def serve() -> None:
    """Entry point of the worker process."""
    request = msgspec.convert(worker_process.read_job(), PlanRequest)
    try:
        worker_process.report({"forecast": msgspec.to_builtins(forecast(request))})
    except DeadlineExceeded as error:
        print(error, file=sys.stderr)
        sys.exit(worker_process.TOO_LATE)
    except ReshardError as error:
        worker_process.report({"error": str(error)})


def forecast(request: PlanRequest) -> Forecast:
    """Returns the forecast. Raises Mismatch or Unsupported for a request that cannot be planned."""
    clock = _Clock()
    clock.begin(STEPS[0])
    choose_code_paths(request.target.tp, gpu=request.device == "cuda")
    torch.set_num_threads(1)
    import_before_forks()
    listed = specs_of(Path(request.folder))
    ignored = [spec.name for spec in listed if matches_any(spec.name, request.ignore)]
    layout = layout_of([spec for spec in listed if not matches_any(spec.name, request.ignore)], request.source)
    index = TensorIndex.of(layout)
    clock.begin(STEPS[1], request.target.engine_ranks)
    cores = len(os.sched_getaffinity(0))
    outlines, refused = _engine_ranks(request, index, cores, clock)
    known = {
        "question": request,
        "tensors": len(layout.tensors),
        "model_bytes": index.nbytes,
        "layout_pieces": index.num_shards,
    }
    if refused:
        return _finished(clock, known | {"refused": refused})
    clock.begin(STEPS[2])
    demands = [outline.demand for outline in outlines]
    topology = ClusterTopology.of(demands, request.trainer_hosts, request.trainer_devices)
    costs = _costs(request, topology)
    try:
        check_unread(unread_tensors(index, demands), ())
        strategy = choose_strategy(request.transport, index, demands, topology, request.bucket_bytes)
    except ReshardError as error:
        message = failure_message("plan", range(request.target.engine_ranks), str(error))
        return _finished(clock, known | {"refused": (message,)})
    ways = [_way(name, request, index, demands, topology, costs) for name in ("ipc", "p2p", "broadcast", "nixl")]
    clock.begin(STEPS[3], request.target.engine_ranks)
    loads = _loads(request, index, strategy, outlines, clock)
    return _finished(
        clock,
        known
        | _figures(request, index, demands, strategy, loads)
        | {"sizing": _sizing(request, index, strategy, outlines, loads)}
        | {
            "predicted_seconds": predicted_seconds(strategy, topology, costs, demands),
            "ways": tuple(ways),
            "remark": ignored_remark(ignored),
        },
    )


def _finished(clock: _Clock, known: dict[str, Any]) -> Forecast:
    clock.end()
    return Forecast(**known, seconds_by_step=clock.seconds)


def _engine_ranks(
    request: PlanRequest, index: TensorIndex, cores: int, clock: _Clock
) -> tuple[list[Outline], tuple[str, ...]]:
    """Returns all engine ranks in order, or the error messages that the trainer would get."""
    found: dict[int, Outline | Refusal] = {}
    work = partial(model_rank, request, index, cores)
    jobs = range(request.target.engine_ranks)
    for rank, outline in run_in_forks(
        work, jobs, processes=request.processes, deadline_seconds=request.deadline_seconds
    ):
        if isinstance(outline, Refusal) and outline.phase == START:  # the others need not be tried
            return [], (f"{START}, engine rank {rank}: {outline.reason}",)
        found[rank] = outline
        clock.advance()
    refusals = {rank: of for rank in jobs if isinstance(of := found[rank], Refusal)}
    if not refusals:
        return [of for rank in jobs if isinstance(of := found[rank], Outline)], ()
    first = refusals[min(refusals)]
    return [], (failure_message(first.phase, sorted(refusals), first.reason),)


def _costs(request: PlanRequest, topology: ClusterTopology) -> Costs:
    """Returns the constants of the cost model, with the given link speeds."""
    costs = usual_costs(topology)
    local, network = request.links
    return replace(costs, local_bytes_s=local or costs.local_bytes_s, network_bytes_s=network or costs.network_bytes_s)


def _way(
    name: str,
    request: PlanRequest,
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    costs: Costs,
) -> Way:
    try:
        strategy = choose_strategy(name, index, demands, topology, request.bucket_bytes)
    except ReshardError as error:
        return Way(name, refused=str(error))
    return Way(name, predicted_seconds(strategy, topology, costs, demands))


def _loads(
    request: PlanRequest, index: TensorIndex, strategy: Strategy, outlines: Sequence[Outline], clock: _Clock
) -> list[EngineLoad]:
    found: dict[int, EngineLoad] = {}

    def work(rank: int) -> EngineLoad:
        return engine_load(index, strategy, rank, outlines[rank].rank_model(), request.bucket_bytes)

    jobs = range(len(outlines))
    for rank, load in run_in_forks(work, jobs, processes=request.processes, deadline_seconds=request.deadline_seconds):
        found[rank] = load
        clock.advance()
    return [found[rank] for rank in jobs]


def _sizing(
    request: PlanRequest,
    index: TensorIndex,
    strategy: Strategy,
    outlines: Sequence[Outline],
    loads: Sequence[EngineLoad],
) -> Sizing:
    ranks = range(request.source.trainer_ranks)
    sent = [sum(load.sent[rank][1].payload_bytes for load in loads if rank in load.sent) for rank in ranks]
    engine_ranks = (
        engine_sizing(strategy, rank, outline.read_plan, outline.rank_model().program, request.bucket_bytes)
        for rank, outline in enumerate(outlines)
    )
    return Sizing(trainer_sizings(index, sent), tuple(engine_ranks))


def _figures(
    request: PlanRequest,
    index: TensorIndex,
    demands: Sequence[RankDemand],
    strategy: Strategy,
    loads: Sequence[EngineLoad],
) -> dict[str, Any]:
    engine_ranks = tuple(
        EngineRank(rank, host, load.received, demand.least_bytes, load.extra, load.messages)
        for rank, (host, demand, load) in enumerate(zip(request.engine_hosts, demands, loads, strict=True))
    )
    held = index.layout.local_bytes()
    trainer_ranks, link_bytes = [], []
    for rank, host in enumerate(request.trainer_hosts):
        sent = [load.sent[rank][1] for load in loads if rank in load.sent]
        links = [load.sent[rank][1].payload_bytes if rank in load.sent else load.read.get(rank, 0) for load in loads]
        messages = sum(load.messages for load in sent)
        trainer_ranks.append(TrainerRank(rank, host, held[rank], sum(links), buckets_bytes(sent), messages))
        link_bytes.append(tuple(links))
    model_bytes = index.nbytes
    return {
        "transport": strategy.name,
        "transport_reason": strategy.reason,
        "engine_ranks": engine_ranks,
        "trainer_ranks": tuple(trainer_ranks),
        "link_bytes": tuple(link_bytes),
        "gather": Gather(model_bytes - min(held), model_bytes, largest_tensor_bytes(index)),
        "messages": sum(load.messages for load in loads),
        "communicators": tuple(
            Communicator(sum(peer < len(held) for peer in group), sum(peer >= len(held) for peer in group))
            for group in strategy.groups
        ),
    }
