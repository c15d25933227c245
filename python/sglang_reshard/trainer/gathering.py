"""Exchanges what each trainer rank has to say, where each of them may fail: all fail then, with the same error.

with Gathering(rank, str, exchange) as told:
    told.own = read()     # on every rank; may raise
told.of_all               # what each rank has said
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import Failure, Outcome, decode, encode
from sglang_reshard.trainer.collectives import gather_bytes

T = TypeVar("T")
logger = get_logger(__name__)
Exchange = Callable[[bytes], Sequence[bytes]]  # returns, on every rank, what each rank has passed, in rank order


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
        if not isinstance(error, ReshardError | None):
            logger.error("trainer rank %d failed; all trainer ranks raise its error", self._rank, exc_info=error)
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
