"""One update under way on one engine rank: its phases, and what all engine ranks agree on between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from sglang_reshard.errors import Aborted, ReshardError
from sglang_reshard.observability import spans
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.peak_memory import PeakMemory
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import UpdateChannel

T = TypeVar("T")
logger = get_logger(__name__)

# In the order in which ranks come to them. Verdicts are exchanged at some, and the words of a failure begin with one.
PHASES = ("prepare", "trace", "plan", "call", "connect", "staged", "ready", "move", "verify", "commit")


class PhaseFailed(Exception):
    """Some rank failed, as all of them know. `what` they had agreed on to say."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


class Vote(Protocol):
    """What an engine rank says of a phase to the others; `error` is empty where it went well."""

    @property
    def error(self) -> str: ...


V = TypeVar("V", bound=Vote)


@dataclass(slots=True)
class UpdateContext:
    """See the module's text.

    rank, size  this engine rank, and how many there are
    kept_bytes  of buffers that an earlier update left
    seconds     phase -> seconds
    now         the phase that was entered last
    digest      of all weights, on engine rank 0, once they have been verified in full
    """

    request: DistributedUpdateWeightsReq
    session: Session
    talk: UpdateChannel
    rank: int
    size: int
    meter: PeakMemory
    kept_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    now: str = "prepare"
    digest: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started, self.now = time.perf_counter(), name
        try:
            with spans.span(f"reshard.{name}", parent=self.request.traceparent, engine_rank=self.rank):
                yield
        finally:
            self.seconds[name] = time.perf_counter() - started

    def gather(self, what: str, message: T) -> list[T]:
        """Every engine rank's message; raises as `UpdateChannel.gather` does."""
        return self.talk.gather(what, self.rank, self.size, message, self.request.timeout_s)

    def agree(self, what: str, verdict: V) -> list[V]:
        """All ranks' verdicts. Raises Refused if any has failed, with what the first of them said."""
        verdicts = self.gather(what, verdict)
        failed = [rank for rank, v in enumerate(verdicts) if v.error]
        if failed:
            raise PhaseFailed(what, refusal(what, failed, verdicts[failed[0]].error))
        return verdicts

    def together(self, step: Callable[[], None]) -> str:
        """A step in which ranks wait for each other: one that fails gives the update up on all of them.

        Returns what went wrong, if anything did.
        """
        try:
            step()
            return ""
        except Exception as error:
            said = told(error)
            self.talk.fail(error, f"{self.now}, engine rank {self.rank}: {said}")
            return said


def phase_of(error: Exception, now: str) -> str:
    """In which phase an update failed: as ranks have agreed, "aborted" if they did not say, else `now`, this rank's."""
    said = str(error).partition(",")[0]
    if said in PHASES:
        return said
    return "aborted" if isinstance(error, Aborted) else now


def refusal(what: str, failed: Sequence[int], error: str) -> str:
    """What the trainer hears when these engine ranks have failed, `error` being what the first of them said."""
    others = f" (engine ranks {list(failed)} failed)" if len(failed) > 1 else ""
    return f"{what}, engine rank {failed[0]}: {error}{others}"


def attempt(step: Callable[[], T]) -> tuple[T | None, str]:
    """A step's result, or what went wrong. The other ranks must hear of any failure, so all are caught."""
    try:
        return step(), ""
    except Exception as error:
        return None, told(error)


def told(error: Exception) -> str:
    if isinstance(error, ReshardError):
        return str(error)
    logger.error("update failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
