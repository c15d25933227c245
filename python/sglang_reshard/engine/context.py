"""Holds the state of one update on one engine rank, and the votes of engine ranks to proceed or fail together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import msgspec

from sglang_reshard.errors import Aborted, ReshardError
from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.peak_memory import PeakMemory
from sglang_reshard.observability.report import RankReport
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import EngineChannel

T = TypeVar("T")
V = TypeVar("V", bound="Vote")
logger = get_logger(__name__)


class Phase(str, Enum):
    """The phases of an update, in order. Error messages, metrics and spans name them."""

    PREPARE = "prepare"
    COMPARE = "compare"
    TRACE = "trace"
    PLAN = "plan"
    CALL = "call"
    CONNECT = "connect"
    STAGED = "staged"
    READY = "ready"
    CHECK = "check"
    MOVE = "move"
    VERIFY = "verify"
    COMMIT = "commit"

    def __str__(self) -> str:
        return self.value


class PhaseFailed(Exception):
    """Raised on every engine rank when any of them votes failure at the end of `phase`."""

    def __init__(self, phase: Phase, message: str) -> None:
        super().__init__(message)
        self.phase = phase


class Vote(msgspec.Struct, frozen=True):
    """Reports to the other engine ranks how a phase ended on this one. `error`: why it failed; empty otherwise."""

    error: str = ""


class PrepareVote(Vote, frozen=True):
    """Ends `prepare`.

    reusable    the transfer of an earlier update can be used again
    accepts     this rank can take the offers of the trainer ranks
    names_open  it failed while the loader was traced, which tensors under other names may mend
    names       digest of the names that its loader was given, and whether others were looked for
    """

    reusable: bool = False
    accepts: bool = False
    names_open: bool = False
    names: str = ""


class PlanVote(Vote, frozen=True):
    """Ends `plan`.

    plan  digest of the strategy, which must be the same on all ranks
    kept  names of the parameters that this rank leaves as they are
    """

    plan: str = ""
    kept: tuple[str, ...] = ()


class WrittenVote(Vote, frozen=True):
    """Ends `commit`.

    report  see `RankReport`
    digest  of all weights, by engine rank 0
    detour  see `Traffic`
    remark  for the trainer's report
    """

    report: RankReport | None = None
    digest: str = ""
    detour: str = ""
    remark: str = ""


@dataclass(slots=True)
class UpdateContext:
    """The state of one update on engine rank `rank` of `size`.

    kept_bytes  bytes of buffers that an earlier update left
    reused      the transfer is an earlier update's
    taken       engine ranks take the trainer ranks' offers instead of all weights
    may_write   all engine ranks have voted to write
    seconds     phase -> seconds
    phase       the phase that was entered last
    digest      of all weights, on engine rank 0, once they have been verified in full
    """

    request: DistributedUpdateWeightsReq
    session: Session
    channel: EngineChannel
    rank: int
    size: int
    memory: PeakMemory
    kept_bytes: int = 0
    reused: bool = False
    taken: bool = False
    may_write: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    phase: Phase = Phase.PREPARE
    digest: str = ""

    @contextmanager
    def enter(self, phase: Phase) -> Iterator[None]:
        """Times a phase, and opens its span."""
        started, self.phase = time.perf_counter(), phase
        try:
            with spans.span(f"reshard.{phase}", parent=self.request.traceparent, engine_rank=self.rank):
                yield
        finally:
            self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + time.perf_counter() - started

    def all_gather(self, name: str, message: T, mark: str = "") -> list[T]:
        """Returns every engine rank's message; raises as `EngineChannel.all_gather` does, where `mark` is explained."""
        return self.channel.all_gather(name, self.rank, self.size, message, self.request.timeout_s, mark)

    def all_gather_votes(self, phase: Phase, vote: V, mark: str = "") -> list[V]:
        """Returns all ranks' votes. Raises PhaseFailed on all of them, with the first error, if any rank failed."""
        return self.check_votes(phase, self.all_gather(phase.value, vote, mark))

    def check_votes(self, phase: Phase, votes: list[V]) -> list[V]:
        """Returns the votes. Raises PhaseFailed with the first error, if any rank failed."""
        failed = [rank for rank, v in enumerate(votes) if v.error]
        if failed:
            raise PhaseFailed(phase, failure_message(phase.value, failed, votes[failed[0]].error))
        return votes

    def attempt(self, step: Callable[..., object], *arguments: Any) -> str:
        """Executes a step. Returns why it has failed, after which all ranks, which may wait for this one, abort."""
        try:
            step(*arguments)
        except Exception as error:
            description = describe_error(error)
            self.channel.abort_because(error, failure_message(self.phase.value, [self.rank], description))
            return description
        return ""


@dataclass(slots=True)
class LastWrite:
    """The last update that wrote this engine rank's weights; by default none.

    stock_changes  as of its request
    kept           names of the parameters, and of parts, that it left as they were
    torn           why the weights are partly written; empty if they are sound
    """

    stock_changes: int = 0
    kept: tuple[str, ...] = ()
    torn: str = ""


def failure_message(phase: str, failed: Sequence[int], error: str) -> str:
    """Returns the message that the trainer gets if engine ranks fail in a phase; `error` is the first one's."""
    others = f" (engine ranks {list(failed)} failed)" if len(failed) > 1 else ""
    return f"{phase}, engine rank {failed[0]}: {error}{others}"


def failed_phase(error: BaseException, current: Phase) -> str:
    """Returns the phase of a failed update; "aborted" if it was cancelled by a rank that is in none of them.

    current  this rank's
    """
    if isinstance(error, PhaseFailed):
        return error.phase.value
    if not isinstance(error, Aborted):
        return current.value
    phase = str(error).partition(",")[0]  # the control server passes on why as text, see `UpdateContext.attempt`
    return phase if phase in list(Phase) else "aborted"


def describe_error(error: BaseException) -> str:
    if isinstance(error, (ReshardError, PhaseFailed)):
        return str(error)
    logger.error("update failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
