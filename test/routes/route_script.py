"""One script of updates that every route goes through, and what a fresh engine says of each."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from route_model import BLOCKS, Blocks, fresh, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sglang_reshard import route_table
from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.routes import route_module
from support.nixl_env import use_nixl
from support.several_engines import name_of, place, sends_of, several_engines_sender
from support.toy_serving import receiver_of

CPU = torch.device("cpu")
TRAINERS, TIMEOUT_S = 2, 60.0
FAULTY_RANK = 1  # of the trainer, and of the engine that fails


def add_store_route() -> None:
    """Adds the line of the example route, in a process of the test: other tests compare the table with documents."""
    route_table.ROUTES["store"] = "store_route"


@dataclass(frozen=True)
class Fault:
    """`method` of one rank's end fails, or kills its process. `first`: nothing is prepared before."""

    side: str
    method: str
    first: bool = False
    kills: bool = False


@dataclass(frozen=True)
class Step:
    """`spoils`: somebody has changed live weights of the rank that fails."""

    options: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    spoils: bool = False


HEALED = Step({"verify": "full"})
SCRIPT = (
    Step(),
    Step(),  # warm
    Step({"verify": "full"}),
    Step({"verify": "full"}),
    Step({"verify": "full"}, spoils=True),
    Step({"staged": True, "verify": "full"}),
    Step({"staged": True, "verify": "full"}),
    Step(fault=Fault("engine", "connect", first=True)),
    HEALED,
    Step(fault=Fault("trainer", "__init__", first=True)),
    Step(fault=Fault("trainer", "connect", first=True)),
    HEALED,
    Step(fault=Fault("engine", "move")),
    HEALED,
    Step(fault=Fault("trainer", "start")),
    HEALED,
)
WARM = (2, 4, 5, 7)  # updates for which nothing has changed


@dataclass(frozen=True)
class Case:
    """What goes through a script.

    transport, around  the route, and those around it
    engines            number of ranks of each; several of them have a `MultiEngineSender`
    dtype, live        of the trainer's blocks, and of the engines'
    repacks            engines convert a part of the model where it arrives
    blocks             number of blocks of the model
    """

    transport: str
    around: tuple[str, ...] = ()
    engines: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float32
    live: torch.dtype | None = None
    repacks: bool = False
    blocks: int = BLOCKS
    bucket_bytes: int = 64 << 10
    script: tuple[Step, ...] = SCRIPT

    @property
    def names(self) -> tuple[str, ...]:
        """Of the engines."""
        return tuple(map(name_of, range(len(self.engines))))

    @property
    def faulty(self) -> int:
        """Number of the engine that fails. It has more than one rank."""
        return len(self.engines) // 2

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return weights_of(version, self.dtype, self.blocks, self.repacks)

    def fresh(self, rank: int, size: int, version: int) -> dict[str, torch.Tensor]:
        return fresh(rank, size, self.dtype, self.live or self.dtype, version, self.blocks, self.repacks)


@dataclass(frozen=True)
class Told:
    """What a trainer rank is told of one engine's update: a report, or the kind of an error and its text."""

    seconds: float
    report: UpdateReport | None = None
    kind: str = ""
    text: str = ""


class Trainers:
    """One trainer rank's sender, to one engine or to several."""

    def __init__(self, trainer: Any, case: Case) -> None:
        given = {"bucket_bytes": case.bucket_bytes, "timeout_s": TIMEOUT_S, "transport": case.transport}
        if "delta" in case.around:
            given["delta"] = "auto"
        self._names, self._sends = case.names, sends_of(trainer, case.engines)
        self._sender: WeightSender | MultiEngineSender
        if len(case.engines) == 1:
            self._sender = WeightSender.over(trainer.group, trainer.send, **given)
        else:
            self._sender, self._host = several_engines_sender(trainer, relay="relay" in case.around, **given)
            self._sender.set_engines(self._sends)

    def update(self, weights: Any, *, killed: bool, **options: Any) -> dict[str, Told]:
        """Returns what is told of each engine. One that fails is there again in the next update, unless `killed`."""
        began, sender = time.monotonic(), self._sender
        try:
            if isinstance(sender, WeightSender):
                found = {self._names[0]: sender.update(weights, **options)}
            else:
                found = sender.update(weights, on_failure="exclude", **options)
        except ReshardError as error:
            told = Told(time.monotonic() - began, None, type(error).__name__, str(error))
            return dict.fromkeys(self._names, told)
        seconds = time.monotonic() - began
        if isinstance(sender, MultiEngineSender) and sender.excluded:
            sender.set_engines({name: send for name, send in self._sends.items() if name not in sender.excluded})
            if not killed:
                sender.set_engines(self._sends)
        return {
            name: Told(seconds, report) if report.success else Told(seconds, None, *report.message.split(": ", 1))
            for name, report in found.items()
        }

    def close(self) -> None:
        self._sender.close()


def train(trainer: Any, case: Case) -> list[dict[str, Told]]:
    use_nixl()
    add_store_route()
    mesh = init_device_mesh("cpu", (trainer.size,))
    sender = Trainers(trainer, case)

    def sharded(version: int) -> dict[str, Any]:
        return {
            name: distribute_tensor(t, mesh, [Replicate() if t.numel() < 8 else Shard(0)], src_data_rank=None)
            for name, t in case.weights(version).items()
        }

    weights, told = sharded(0), []
    for number, step in enumerate(case.script, start=1):
        for name, tensor in sharded(number).items():
            weights[name].to_local().copy_(tensor.to_local())
        killed = step.fault is not None and step.fault.kills
        with failing(step.fault, "trainer", case, trainer.rank == FAULTY_RANK):
            told.append(sender.update(weights.items(), killed=killed, weight_version=str(number), **step.options))
        if killed and step.fault.side == "trainer":
            return told
    sender.close()
    return told


@dataclass(frozen=True)
class Seen:
    """What one engine rank has after an update.

    version  of the weights; None if they are those of none
    calls    of Python functions in `move`
    held     bytes that are kept until the next update
    """

    version: int | None
    torn: bool
    calls: int
    held: int


def serve(rank: int, _ranks: int, requests: Any, case: Case) -> dict[int, Seen]:
    """Returns what was seen after each step that has reached this engine, by its number."""
    use_nixl()
    add_store_route()
    engine, rank = place(rank, case.engines)
    size = case.engines[engine]
    model = Blocks(rank, size, case.live or case.dtype, case.blocks, case.repacks)
    receiver = receiver_of(model, rank, size)
    seen = {}
    fails = engine == case.faulty and rank == FAULTY_RANK
    for request in until_the_trainer_ends(requests):
        number = int(request.weight_version)
        step = case.script[number - 1]
        fault = step.fault
        if step.spoils and fails:
            model.blocks[0].norm.data[0] += 1
        if fault is not None and fault.first:
            receiver._executor.transfers.clear()
        calls = [0]
        with failing(fault, "engine", case, fails), counting(receiver, calls):
            requests.answer(receiver.update(request))
        last = receiver._executor.transfers.last
        held = 0 if last is None else last.held_bytes - last.landing.staged_bytes
        live, versions = model.live(), range(number, 0, -1)
        version = next((v for v in versions if same(live, case.fresh(rank, size, v))), None)
        seen[number] = Seen(version, bool(receiver.torn), calls[0], held)
    return seen


def until_the_trainer_ends(requests: Any) -> Iterator[Any]:
    try:
        yield from requests
    except (EOFError, ConnectionResetError, BrokenPipeError):  # it was killed
        return


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@contextmanager
def failing(fault: Fault | None, side: str, case: Case, fails: bool) -> Iterator[None]:
    """Within it this rank's end of the outermost route that has one on this side fails, if it `fails`."""
    with ExitStack() as stack:
        if fault is not None and fault.side == side and fails:
            ends = (getattr(route_module(n), f"{side}_end", None) for n in (*reversed(case.around), case.transport))
            if end := next(filter(None, ends), None):
                broken = _die if fault.kills else mock.Mock(side_effect=OSError("the wire was cut"))
                stack.enter_context(mock.patch.object(end, fault.method, broken))
        yield


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def counting(receiver: WeightReceiver, calls: list[int]) -> Iterator[None]:
    """Counts the Python functions that run in `move` of an end that is there before."""
    last = receiver._executor.transfers.last
    if last is None:
        yield
        return

    def count(_frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call"

    move: Callable[..., None] = last.end.move

    def counted(*arguments: Any) -> None:
        sys.setprofile(count)
        try:
            move(*arguments)
        finally:
            sys.setprofile(None)

    with mock.patch.object(last.end, "move", counted):
        yield
