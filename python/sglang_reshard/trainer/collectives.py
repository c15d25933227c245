"""Sends small typed messages over the trainer's own process groups. Nothing is pickled.

The group's own timeout bounds each wait. DeadlineExceeded is raised when it has passed, or a rank has disconnected.
Where each rank has something to say, and may fail, all fail with the same error:

    with gathering(str, group) as told:
        told.own = read()     # on every rank; may raise
    told.of_all               # what each rank has said
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded, ReshardError, Unsupported
from sglang_reshard.protocol.messages import Failure, Outcome, decode, encode

T = TypeVar("T")
Exchange = Callable[[bytes], Sequence[bytes]]  # returns, on every rank, what each rank has passed, in rank order


@contextlib.contextmanager
def translated_errors(group: dist.ProcessGroup) -> Iterator[None]:
    """Turns the errors of a collective into DeadlineExceeded."""
    try:
        yield
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"trainer rank {dist.get_rank(group)} (host {socket.gethostname()}): other trainer ranks did not join the "
            f"collective, or have died: {error}. Look at their logs"
        ) from error


def broadcast_message(message: T | None, kind: type[T], group: dist.ProcessGroup, root_rank: int = 0) -> T:
    """Returns the message of rank `root_rank` of the group on every rank. Collective over a CPU group."""
    root = dist.get_process_group_ranks(group)[root_rank]
    data = _as_tensor(encode(message)) if message is not None else None
    size = torch.tensor([data.numel() if data is not None else 0])
    with translated_errors(group):
        dist.broadcast(size, root, group=group)
        if data is None:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, root, group=group)
    return decode(data.numpy().tobytes(), kind)


def require_cpu_backend(group: dist.ProcessGroup) -> None:
    """Raises Unsupported for a group without a CPU backend: messages are in host memory."""
    if "cpu:" not in (backends := dist.get_backend_config(group)):
        raise Unsupported(
            f"the process group has no CPU backend ({backends}), which sglang-reshard needs to exchange metadata. Call "
            "init_process_group('cpu:gloo,cuda:nccl'), or pass a gloo group"
        )


def on_first_rank(call: Callable[[], T], group: dist.ProcessGroup, kind: Any = Any) -> T:
    """Calls `call` on the group's first rank, and returns its result, or raises its error, on every rank.

    The result is decoded from msgpack on all ranks alike, as a `kind`; without one, tuples and tensors become lists.
    Collective over a CPU group.
    """
    require_cpu_backend(group)
    outcome = cause = None
    if dist.get_rank(group) == 0:
        try:
            outcome = Outcome(call())
        except Exception as error:
            cause, outcome = error, Outcome(None, Failure.of(error))
    outcome = broadcast_message(outcome, Outcome[kind], group)  # generated tokens may be many: no rank gathers them
    if outcome.failure is not None:
        raise outcome.failure.error() from cause
    return cast(T, outcome.value)


def first_rank_address(group: dist.ProcessGroup) -> str:
    """Returns the address at which other hosts reach the group's first rank, if that is global rank 0; else loopback.

    It is MASTER_ADDR's, as ranks of other hosts resolve it: a host often resolves its own name to loopback. Collective.
    """
    found = ""
    if dist.get_process_group_ranks(group)[0] == 0:
        with contextlib.suppress(OSError):
            found = str(socket.getaddrinfo(os.environ.get("MASTER_ADDR"), None)[0][4][0])
    addresses = gather_messages(found, str, group)
    return next((a for a in addresses if a and not ipaddress.ip_address(a).is_loopback), "127.0.0.1")


def gather_messages(message: object, kind: type[T], group: dist.ProcessGroup) -> list[T]:
    """Returns every rank's message, in rank order, on every rank. Collective over a CPU group."""
    return [decode(data, kind) for data in gather_bytes(encode(message), group)]


def gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Returns what every rank passes, in rank order, on every rank. Collective over a CPU group."""
    data, ranks = _as_tensor(own), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    with translated_errors(group):
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    longest = max(map(int, sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    with translated_errors(group):
        dist.all_gather(gathered, padded, group=group)
    return [all_[: int(size)].numpy().tobytes() for all_, size in zip(gathered, sizes, strict=True)]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Gathering(Generic[T]):
    """A block that every trainer rank runs, at whose end they exchange what they say.

    own     what this rank says, set in the block; None if it says nothing
    of_all  what each rank has said, in rank order, once the block has ended

    If the block of any rank raises, every rank raises the first one's error, which names its rank. A rank whose block
    raises when the others cannot be reached raises its own.
    """

    def __init__(self, trainer_rank: int, kind: Any, exchange: Exchange) -> None:
        """`kind`: the type of the ranks' messages."""
        self._rank, self._kind, self._exchange = trainer_rank, Outcome[kind], exchange
        self.own: T | None = None
        self.of_all: list[T] = []

    def __enter__(self) -> Gathering[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C
        own = Outcome(self.own) if error is None else Outcome(None, Failure.on(self._rank, error))
        try:
            outcomes = [decode(told, self._kind) for told in self._exchange(encode(own))]
        except ReshardError:
            if error is None:
                raise
            return
        for outcome in outcomes:
            if outcome.failure is not None:
                raise outcome.failure.error() from error
        self.of_all = [outcome.result() for outcome in outcomes]


def gathering(kind: type[T], group: dist.ProcessGroup) -> Gathering[T]:
    """Returns a block for all ranks of a CPU group."""
    return Gathering(dist.get_rank(group), kind, functools.partial(gather_bytes, group=group))


def gather(call: Callable[[], T], kind: type[T], group: dist.ProcessGroup) -> list[T]:
    """Calls `call` on every rank of a CPU group. Returns every rank's result, in rank order. Raises as `Gathering`."""
    with gathering(kind, group) as told:
        told.own = call()
    return told.of_all
