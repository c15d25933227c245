"""Models one engine rank: its real SGLang model without memory, its traced loader, its read plan and demand."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.cli.plan.checkpoint import dtype_of, has_files
from sglang_reshard.cli.plan.models import CONFIG
from sglang_reshard.cli.plan.request import PlanRequest
from sglang_reshard.cli.plan.sglang_model import build_rank
from sglang_reshard.cli.plan.sizes import start_failure
from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.checkpoint_headers import folder_specs
from sglang_reshard.plan import RankDemand, RankLocation, ReadPlan, TensorIndex, plan_reads, rank_demand
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace

START = "SGLang's own start"  # the phase before those of an update


@dataclass(frozen=True, slots=True)
class RankModel:
    """One engine rank's plan.

    program  the traced loader without its steps; its targets are meta tensors, which travel between processes
    """

    demand: RankDemand
    read_plan: ReadPlan
    program: Program


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why an engine rank would refuse the update, and the phase that refuses it."""

    phase: str
    reason: str


def model_rank(request: PlanRequest, index: TensorIndex, cores: int, engine_rank: int) -> RankModel | Refusal:
    """Builds and traces an engine rank in this process, which cannot build another one; returns why if it cannot."""
    try:
        model = _built(request, engine_rank)
    except (Exception, SystemExit) as error:
        config = json.loads((Path(request.folder) / CONFIG).read_text())
        return Refusal(START, start_failure(error, config, request.target, request.model))
    try:
        specs = [t.spec for t in index.layout.tensors]
        program = trace(model, specs, functools.partial(_start, request), weightless=True)
    except ReshardError as error:
        return Refusal("prepare", str(error))
    host, device = request.engine_hosts[engine_rank], request.engine_devices[engine_rank]
    ranks = request.target.engine_ranks
    location = RankLocation(engine_rank, ranks, host, request.trainer_hosts, device, request.trainer_devices)
    reads = plan_reads(index, program.copies, location)
    targets = {name: torch.empty(t.numel(), dtype=t.dtype, device="meta") for name, t in program.targets.items()}
    demand = rank_demand(index, reads, host, cores, device)
    return RankModel(
        demand, reads, Program(program.copies, targets, seconds=program.seconds, arrivals=program.arrivals)
    )


def _built(request: PlanRequest, engine_rank: int) -> torch.nn.Module:
    # Otherwise torch would blame the fork for a model that needs a GPU, rather than the missing GPU.
    vars(torch.cuda)["_lazy_init"] = _no_gpu
    if request.device == "cpu":
        return _build(request, engine_rank)
    try:
        return _build(request, engine_rank, attention_backend="triton")
    except AssertionError as error:
        # Some models need another backend, on which no weight depends; SGLang checks it before it builds anything.
        if "attention backend" not in str(error):
            raise
        return _build(request, engine_rank, attention_backend="torch_native")


def _build(request: PlanRequest, engine_rank: int, **server_args: Any) -> torch.nn.Module:
    target = request.target
    if target.dp > 1:
        server_args |= {"dp_size": target.dp, "enable_dp_attention": True}
    return build_rank(
        request.folder,
        tp_size=target.tp,
        tp_rank=engine_rank,
        ep_size=target.ep,
        pp_size=target.pp,
        dtype=dtype_of(json.loads((Path(request.folder) / CONFIG).read_text())),
        weightless=True,
        **server_args,
    )


def _start(request: PlanRequest) -> EngineStart:
    """Returns how an engine starts on the folder that is planned for."""
    folder = Path(request.folder)
    if not has_files(folder):
        return EngineStart(None, f"{folder} has no safetensors")
    return EngineStart(folder_specs(folder))


def _no_gpu() -> None:
    raise RuntimeError("there is no GPU on this host")
