"""Makes the plan, in a worker process: SGLang chooses its code paths at import, and a process can be one rank only.

Every engine rank is built, traced and planned for in a separate fork. The functions that choose a strategy for engine
ranks then get the results of all forks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from sglang_reshard.cli.plan import worker_process
from sglang_reshard.cli.plan.checkpoint import specs_of
from sglang_reshard.cli.plan.cost import costs_with, predicted_seconds
from sglang_reshard.cli.plan.figures import Communicator, Forecast, Gather, TrainerRank, Way
from sglang_reshard.cli.plan.rank_model import (
    NOTHING,
    START,
    EngineLoad,
    RankModel,
    Refusal,
    buckets_bytes,
    engine_load,
    model_rank,
)
from sglang_reshard.cli.plan.request import PlanRequest, layout_of
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.cli.plan.sizing import Sizing, engine_sizing, trainer_sizings
from sglang_reshard.cli.plan.worker_process import run_in_forks
from sglang_reshard.engine.context import failure_message
from sglang_reshard.engine.unread import check_unread
from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.names import ignored_remark, matches_any
from sglang_reshard.plan import ClusterTopology, TensorIndex, unread_tensors
from sglang_reshard.route_table import ROUTES
from sglang_reshard.routes import choose_strategy
from sglang_reshard.routes.strategy import Strategy

T = TypeVar("T")


def serve(job: Any) -> None:
    """Entry point of the worker process."""
    worker_process.report({"forecast": msgspec.to_builtins(forecast(msgspec.convert(job, PlanRequest)))})


def forecast(request: PlanRequest) -> Forecast:
    """Returns the forecast. Raises Mismatch or Unsupported for a request that cannot be planned."""
    _begin("import SGLang")
    choose_code_paths(request.target.tp, gpu=request.device == "cuda")
    torch.set_num_threads(1)
    import_before_forks()
    listed = specs_of(Path(request.folder))
    ignored = [spec.name for spec in listed if matches_any(spec.name, request.ignore)]
    layout = layout_of([spec for spec in listed if not matches_any(spec.name, request.ignore)], request.source)
    index = TensorIndex.of(layout)
    bare = Forecast(
        question=request, tensors=len(layout.tensors), model_bytes=index.nbytes, layout_pieces=index.num_shards
    )
    _begin("build, trace and take in", request.target.ranks)
    ranks = _engine_ranks(request, index)
    if isinstance(ranks, str):
        return msgspec.structs.replace(bare, refused=(ranks,))
    _begin("choose")
    demands = [rank.demand for rank in ranks]
    topology = ClusterTopology.of(demands, request.trainer_hosts, request.trainer_devices)
    costs = costs_with(request.links, topology)

    def choose(transport: str) -> Strategy:
        return choose_strategy(transport, index, demands, topology, request.bucket_bytes)

    def seconds(strategy: Strategy) -> float:
        return predicted_seconds(strategy, topology, costs, demands)

    try:
        check_unread(unread_tensors(index, demands), (), {})
        strategy = choose(request.transport)
    except ReshardError as error:
        message = failure_message("plan", range(request.target.ranks), str(error))
        return msgspec.structs.replace(bare, refused=(message,))
    ways = tuple(_way(name, choose, seconds) for name in ROUTES)
    _begin("cut messages", request.target.ranks)
    loads = dict(
        _of_engine_ranks(request, lambda rank: engine_load(index, strategy, rank, ranks[rank], request.bucket_bytes))
    )
    figures = _figures(request, index, ranks, strategy, [loads[rank] for rank in range(len(ranks))])
    return msgspec.structs.replace(
        bare, **figures, predicted_seconds=seconds(strategy), ways=ways, remark=ignored_remark(ignored)
    )


def _begin(step: str, of: int = 1) -> None:
    worker_process.report({"step": step, "of": of})


def _of_engine_ranks(request: PlanRequest, work: Callable[[int], T]) -> Iterator[tuple[int, T]]:
    """Yields each engine rank with the result of `work`, from a fork, as they end. Reports each that is done."""
    ranks, seconds = range(request.target.ranks), request.deadline_seconds
    for found in run_in_forks(work, ranks, processes=request.processes, deadline_seconds=seconds):
        worker_process.report({"done": 1})
        yield found


def _engine_ranks(request: PlanRequest, index: TensorIndex) -> list[RankModel] | str:
    """Returns all engine ranks in order, or the error message that the trainer would get."""
    models: dict[int, RankModel] = {}
    refusals: dict[int, Refusal] = {}
    for rank, found in _of_engine_ranks(request, partial(model_rank, request, index)):
        if isinstance(found, RankModel):
            models[rank] = found
        elif found.phase == START:  # the others need not be tried
            return f"{START}, engine rank {rank}: {found.reason}"
        else:
            refusals[rank] = found
    if refusals:
        first = refusals[min(refusals)]
        return failure_message(first.phase, sorted(refusals), first.reason)
    return [models[rank] for rank in sorted(models)]


def _way(name: str, choose: Callable[[str], Strategy], seconds: Callable[[Strategy], float]) -> Way:
    try:
        return Way(name, seconds(choose(name)))
    except ReshardError as error:
        return Way(name, refused=str(error))


def _figures(
    request: PlanRequest,
    index: TensorIndex,
    ranks: Sequence[RankModel],
    strategy: Strategy,
    loads: Sequence[EngineLoad],
) -> dict[str, Any]:
    held = index.layout.local_bytes()
    trainer_ranks, link_bytes, sent_bytes = [], [], []
    for rank, host in enumerate(request.trainer_hosts):
        links = [load.links.get(rank, NOTHING) for load in loads]
        messages = sum(link.sent_messages for link in links)
        extra = buckets_bytes((link.sent_messages, link.sent_bucket_bytes) for link in links)
        link_bytes.append(tuple(link.payload_bytes for link in links))
        sent_bytes.append(sum(link.payload_bytes for link in links if link.messages))
        trainer_ranks.append(TrainerRank(rank, host, held[rank], sum(link_bytes[-1]), extra, messages))
    needs = [
        engine_sizing(strategy, rank, of.read_plan, of.program, request.bucket_bytes) for rank, of in enumerate(ranks)
    ]
    largest = max((math.prod(kind.shape) * kind.item_bytes for kind in index.classes), default=0)
    return {
        "transport": strategy.name,
        "transport_reason": strategy.reason,
        "engine_ranks": tuple(load.figures for load in loads),
        "trainer_ranks": tuple(trainer_ranks),
        "link_bytes": tuple(link_bytes),
        "gather": Gather(index.nbytes - min(held), index.nbytes, largest),
        "sizing": Sizing(trainer_sizings(index, sent_bytes), tuple(needs)),
        "messages": sum(load.figures.messages for load in loads),
        "communicators": tuple(
            Communicator(sum(peer < len(held) for peer in group), sum(peer >= len(held) for peer in group))
            for group in strategy.groups
        ),
    }
