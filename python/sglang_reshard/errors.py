"""Defines the exceptions of this package. Messages state what is wrong, which tensor, which rank, what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_reshard.observability.report import UpdateReport


class ReshardError(RuntimeError):
    """Base class of all exceptions that this package raises on purpose. The message is the problem, then the remedy.

    problem  what is wrong
    cure     what to do next; empty where the problem says so itself
    """

    def __init__(self, problem: str = "", *, cure: str = "") -> None:
        super().__init__(f"{problem}; {cure}" if cure else problem)
        self.problem, self.cure = problem, cure


class Unsupported(ReshardError):
    """The configuration is not supported. Nothing was written; the old weights keep serving."""


class Mismatch(ReshardError):
    """Trainer and engine, or two ranks of one side, disagree. Nothing was written; the old weights keep serving."""


class DeadlineExceeded(ReshardError):
    """A wait timed out. The message names the phase, the ranks and the missing step."""


class TornWeights(ReshardError):
    """An update failed while weights were being written. The engine serves nothing until an update succeeds."""


class WeightsMissing(ReshardError):
    """An engine that has no weights yet was asked for tokens: it started on dummy weights, or has released its own."""


class EngineRefused(ReshardError):
    """The engine reported a failure; the message is its own. The old weights keep serving, unless it says otherwise."""


class EngineUnreachable(EngineRefused):
    """The engine's server did not answer, or its connection broke. An update's error says which weights serve."""


class Aborted(ReshardError):
    """Another rank failed or disconnected, which aborted the update on all ranks."""


class PeerDisconnected(ReshardError):
    """The connection to another rank broke. Most often that rank has failed, and reports the cause."""


class ConnectionLost(ReshardError):
    """The connection to trainer rank 0's process, which hosts the session, was lost."""


class Unauthorized(ReshardError):
    """A key was wrong: the session's between ranks, or an API key of a server."""


class EngineDied(ReshardError):
    """A process of the engine has died. Shut the engine down and start a new one."""


class ProbeMismatch(ReshardError):
    """A probe found that the engine computes something else than the trainer. The new weights are live and serving.

    reports  engine -> report of the update, with its `probe`
    """

    def __init__(self, message: str, reports: Mapping[str, UpdateReport] | None = None) -> None:
        super().__init__(message)
        self.reports = dict(reports or {})
