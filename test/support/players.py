"""The processes of an `Orchestra`: trainer ranks and engine ranks that are told what to do, one order at a time.

Trainer ranks have the real `WeightSender` and DTensors on a gloo group, engine ranks the real `WeightReceiver` on a
toy model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.errors import EngineRefused
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Step,
    decode,
    encode,
)
from sglang_reshard.routes import options_around
from support.stations import Arm, Stations
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.toy_trainers import sharded

_GROUP = timedelta(seconds=60)


@dataclass(frozen=True)
class Links:
    """A process's ends of its pipes: orders and answers, the stations' gate, and trainer rank 0's way to the engine."""

    orders: Connection
    gate: Connection
    engine: Connection | None


# -- orders


@dataclass(frozen=True)
class Update:
    """To a trainer rank: its weights become this version, unless it is None, and it calls `update`."""

    version: int | None
    transport: str
    bucket_bytes: int
    options: dict[str, Any] = field(default_factory=dict)
    arm: Arm | None = None


@dataclass(frozen=True)
class Call:
    """To any rank: call a function of a test with what this rank is, and answer with what it returns."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ask:
    """To an engine rank: a step of an update, as SGLang's schedulers get it."""

    number: int
    step: Step
    request: bytes


# -- answers


@dataclass(frozen=True)
class Ended:
    """How an update ended on a trainer rank: the error's class and words, both empty for none.

    at  a time of the monotonic clock, which all processes of a host share
    """

    kind: str
    message: str
    at: float


@dataclass(frozen=True)
class Answered:
    """What an engine rank answered to `Ask`, and when."""

    number: int
    output: bytes
    at: float


# -- trainer ranks


@dataclass
class TrainerRank:
    """What a `Call` to a trainer rank gets."""

    rank: int
    state: list[tuple[str, torch.Tensor]]
    sender: WeightSender
    values: Callable[[int], dict[str, torch.Tensor]]

    def become(self, version: int) -> None:
        """Written in place, as an optimizer writes. No communication: others may be dead."""
        whole = self.values(version)
        for name, tensor in self.state:
            if isinstance(tensor, DTensor):
                new = distribute_tensor(whole[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor._local_tensor.copy_(new._local_tensor)
            else:
                tensor.data.copy_(whole[name])


def served(ranks: int) -> list[tuple[str, torch.Tensor]]:
    """The demonstration's model under tensor parallelism."""
    from sglang_reshard.cli.layouts import Source
    from sglang_reshard.selftest import tiny_model
    from sglang_reshard.selftest.trainer import Trainer

    model = Trainer(tiny_model.config(ranks, ranks), Source(tp=ranks)).model
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def served_values(version: int) -> dict[str, torch.Tensor]:
    """Whole tensors of a version of the demonstration's model for two ranks."""
    from transformers import Qwen3ForCausalLM

    from sglang_reshard.selftest import tiny_model

    torch.manual_seed(version)
    return dict(Qwen3ForCausalLM(tiny_model.config(2, 2)).named_parameters())


def play_trainer(rank: int, size: int, meeting: str, timeout_s: float, url: str, hidden: int, links: Links) -> None:
    """A trainer rank's process.

    meeting  path of a file that the ranks of this life find each other by
    url      of an SGLang server with the demonstration's model; empty: the orchestra's own engine ranks, a toy
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, size), rank=rank, world_size=size, timeout=_GROUP)
    send = None
    if links.engine is not None:
        remote = RemoteEngine(url, timeout_s=timeout_s) if url else None
        send = remote.update_weights_distributed if remote else _reach(links.engine)
    sender = WeightSender.over(dist.group.WORLD, send, timeout_s=timeout_s, delta="auto")
    stations = Stations(links.gate).install("trainer")
    state = served(size) if url else list(sharded(0, (size,), "tp", torch.float32, hidden))
    values = served_values if url else functools.partial(checkpoint, hidden=hidden)
    me = TrainerRank(rank, state, sender, values)
    links.orders.send(None)
    while (order := links.orders.recv()) is not None:
        if isinstance(order, Update):
            stations.arm(order.arm)
            links.orders.send(_updated(me, order))
        else:
            links.orders.send(order.function(me, *order.arguments))
    with contextlib.suppress(BrokenPipeError):
        sender.close()
    os._exit(0)  # gloo's group waits for ranks that have been killed


def _updated(me: TrainerRank, order: Update) -> Ended:
    if order.version is not None:
        me.become(order.version)
    if (coordinator := me.sender._coordinator) is not None:  # one sender, so that what it keeps outlives each transport
        delta = order.options.get("delta", "off")
        coordinator._config = replace(
            coordinator._config, transport=order.transport, bucket_bytes=order.bucket_bytes, delta=delta
        )
        coordinator._around = options_around(coordinator._config)
    options = {name: value for name, value in order.options.items() if name != "delta"}
    background = options.pop("background", False)
    try:
        if background:
            me.sender.update_async(me.state, **options).wait()
        else:
            me.sender.update(me.state, **options)
        return Ended("", "", time.monotonic())
    except Exception as error:
        return Ended(type(error).__name__, str(error) or traceback.format_exc(), time.monotonic())


def _reach(engine: Connection) -> Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]:
    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        engine.send(encode(request))
        answer = engine.recv()
        if isinstance(answer, str):
            raise EngineRefused(answer)
        return decode(answer, DistributedUpdateWeightsOutput)

    return send


# -- engine ranks


@dataclass
class EngineRank:
    """What a `Call` to an engine rank gets."""

    rank: int
    hidden: int
    model: ToyRank
    receiver: WeightReceiver


def play_engine(rank: int, size: int, hidden: int, links: Links) -> None:
    """An engine rank's process. It begins with version 0 of the weights."""
    torch.set_num_threads(1)
    model = ToyRank(rank, size, hidden=hidden)
    model.load_weights(checkpoint(0, hidden=hidden).items())
    receiver = receiver_of(model)
    stations = Stations(links.gate).install("engine")
    me = EngineRank(rank, hidden, model, receiver)
    links.orders.send(None)
    while (order := links.orders.recv()) is not None:
        if isinstance(order, Ask):
            output = _asked(receiver, order.step, decode(order.request, DistributedUpdateWeightsReq))
            links.orders.send(Answered(order.number, encode(output), time.monotonic()))
        elif isinstance(order, Arm):
            stations.arm(order)
        else:
            links.orders.send(order.function(me, *order.arguments))
    os._exit(0)


def _asked(
    receiver: WeightReceiver, step: Step, request: DistributedUpdateWeightsReq
) -> DistributedUpdateWeightsOutput:
    """As `patches.model_runner` does it."""
    if step == "stage":
        return receiver.stage(request)
    if step == "staged":
        return receiver.staged() or DistributedUpdateWeightsOutput(success=True, message="", under_way=True)
    return receiver.commit(request) if step == "commit" else receiver.update(request)


def versions(me: EngineRank, asked: tuple[int, ...]) -> tuple[int | None, str]:
    """Which of these versions an engine rank has, bit by bit, None for none of them; and why it is torn, if it is."""
    found = (version for version in asked if not me.model.differing(checkpoint(version, hidden=me.hidden)))
    return next(found, None), me.receiver.torn
