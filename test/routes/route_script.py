"""One script of updates that every route goes through, and what a fresh engine says of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import route_table
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ReshardError
from sglang_reshard.routes import route_module
from support.nixl_env import use_nixl
from support.toy import DRIFTING, ToyRank, checkpoint

CPU = torch.device("cpu")
BLOCKS, HIDDEN, BUCKET_BYTES = 6, 48, 64 << 10
TRAINERS, ENGINES = 2, 4


def add_store_route() -> None:
    """Adds the line of the example route, in a process of the test: other tests compare the table with documents."""
    route_table.ROUTES["store"] = "store_route"


@dataclass(frozen=True)
class Fault:
    """`method` of one rank's end fails. `first`: nothing is prepared before."""

    side: str
    method: str
    first: bool = False


@dataclass(frozen=True)
class Size:
    """How large the model and a bucket are, and how many steps of the script are gone through."""

    blocks: int = BLOCKS
    bucket_bytes: int = BUCKET_BYTES
    steps: int | None = None


@dataclass(frozen=True)
class Step:
    options: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None


HEALED = Step({"verify": "full"})
SCRIPT = (
    Step(),
    Step(),  # warm
    Step({"verify": "full"}),
    Step({"verify": "full"}),
    Step({"staged": True, "verify": "full"}),
    Step({"staged": True}),
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
WARM = (2, 4, 6)  # updates for which nothing has changed


class Blocks(torch.nn.Module):
    """Several toy engine ranks in one: a model of many tensors."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype, blocks: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(ToyRank(rank, size, dtype, HIDDEN) for _ in range(blocks))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            block, _, rest = name.partition(".")
            self.blocks[int(block)].load_weights([(rest, tensor)])


def weights_of(version: int, dtype: torch.dtype, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    """Few elements differ from version to version, so that deltas pay."""
    found = {}
    for block in range(blocks):
        found |= {f"{block}.{n}": t for n, t in checkpoint(DRIFTING + 1000 * block + version, dtype, HIDDEN).items()}
    return found


def train(trainer: Any, transport: str, options: dict[str, Any], dtype: torch.dtype, size: Size) -> list[Any]:
    use_nixl()
    add_store_route()
    mesh = init_device_mesh("cpu", (trainer.size,))
    sender = WeightSender.over(
        trainer.group, trainer.send, bucket_bytes=size.bucket_bytes, timeout_s=20, transport=transport, **options
    )
    first = weights_of(0, dtype, size.blocks)
    weights = {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in first.items()}
    told: list[Any] = []
    for number, step in enumerate(SCRIPT[: size.steps], start=1):
        for name, tensor in weights_of(number, dtype, size.blocks).items():
            weights[name].to_local().copy_(distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None).to_local())
        with failing(step.fault, "trainer", transport, options, trainer.rank):
            try:
                told.append(sender.update(weights.items(), weight_version=str(number), **step.options))
            except ReshardError as error:
                told.append((type(error).__name__, str(error)))
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


def serve(
    rank: int, ranks: int, requests: Any, transport: str, options: dict[str, Any], dtype: torch.dtype, size: Size
) -> list[Seen]:
    use_nixl()
    add_store_route()
    model = Blocks(rank, ranks, dtype, size.blocks)
    receiver = WeightReceiver(TracedModel(model), rank, ranks, CPU)
    seen = []
    for request in requests:
        step = SCRIPT[request.update - 1]
        if step.fault is not None and step.fault.first:
            receiver._executor.transfers.clear()
        calls = [0]
        with failing(step.fault, "engine", transport, options, rank), counting(receiver, calls):
            requests.answer(receiver.update(request))
        last = receiver._executor.transfers.last
        held = 0 if last is None else last.held_bytes - last.landing.staged_bytes
        version = version_of(model, rank, ranks, dtype, request.update)
        seen.append(Seen(version, bool(receiver.torn), calls[0], held))
    return seen


def version_of(model: Blocks, rank: int, ranks: int, dtype: torch.dtype, newest: int) -> int | None:
    """Returns which version a fresh engine would have to load, to have these weights bit for bit."""
    for version in range(newest, 0, -1):
        fresh = Blocks(rank, ranks, dtype, len(model.blocks))
        fresh.load_weights(weights_of(version, dtype, len(model.blocks)).items())
        if all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True)):
            return version
    return None


@contextmanager
def failing(fault: Fault | None, side: str, transport: str, options: dict[str, Any], rank: int) -> Iterator[None]:
    """Within it rank 1's end of the route fails, where it has such an end."""
    around = [name for name in ("delta",) if options.get(name) == "auto"]
    with ExitStack() as stack:
        for name in (transport, *around)[-1:]:
            end = getattr(route_module(name), f"{side}_end", None)
            if fault is not None and fault.side == side and rank == 1 and end is not None:
                broken = mock.Mock(side_effect=OSError("the wire was cut"))
                stack.enter_context(mock.patch.object(end, fault.method, broken))
        yield


@contextmanager
def counting(receiver: WeightReceiver, calls: list[int]) -> Iterator[None]:
    """Counts the Python functions that run in `move` of an end that is there before."""
    last = receiver._executor.transfers.last
    if last is None:
        yield
        return

    def count(_frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call"

    move = last.end.move

    def counted(*arguments: Any) -> None:
        sys.setprofile(count)
        try:
            move(*arguments)
        finally:
            sys.setprofile(None)

    with mock.patch.object(last.end, "move", counted):
        yield
