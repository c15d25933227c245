"""Updates without SGLang: processes of the tests stand in for trainer ranks and engine ranks."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmark.results import REPOSITORY

T = TypeVar("T")
_WAIT_S = 300.0


def run_world(module: str, trainers: int, engines: int, *arguments: Any, deadline_s: float) -> tuple[Any, Any]:
    """Runs `train` and `serve` of a module, each with its arguments, on so many ranks. Returns what each rank returns.

    train  gets `support.world.Trainer` first
    serve  gets its rank, the number of ranks and the requests first; a module without engine ranks has none
    """
    find_tests()
    from support.world import run_world

    of = importlib.import_module(module)  # and not __main__, which other processes cannot import
    return run_world(trainers, engines, of.train, getattr(of, "serve", None), *arguments, deadline_s=deadline_s)


def find_tests() -> None:
    """Makes what the tests share importable, in this process."""
    path = str(REPOSITORY / "test")
    if path not in sys.path:
        sys.path.insert(0, path)


def sender(trainer: Any, transport: str) -> Any:
    from sglang_reshard.api.weight_sender import WeightSender

    return WeightSender.over(trainer.group, trainer.send, transport=transport, timeout_s=_WAIT_S)


def updates(model: torch.nn.Module, rank: int, ranks: int, requests: Any) -> Iterator[Any]:
    """Updates an engine rank's model as requests ask. Yields each request when it is answered."""
    from sglang_reshard.engine.receiver import WeightReceiver
    from sglang_reshard.engine.targets import TracedModel

    receiver = WeightReceiver(TracedModel(model), rank, ranks, torch.device("cpu"))
    for request in requests:
        requests.answer(receiver.update(request))
        yield request


def slowest(call: Callable[[], T]) -> tuple[T, float]:
    """Returns what a call returns, and the seconds that it takes on the slowest trainer rank. Collective."""
    dist.barrier()
    started = time.perf_counter()
    returned = call()
    mine = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return returned, float(mine)


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a hash of all bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
