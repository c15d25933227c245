"""Ends an engine's update on trainer rank 0: finds out what has become of the weights, as its answer may be wrong.

The answer may be lost, late or mistaken: a proxy repeats a request and returns the refusal of the second one, or an
engine reports at its deadline that some of its processes are silent, and they end well. So the mark on the control
server decides, and a claim of success counts only with the mark WRITTEN. Otherwise the update is revoked before an
outcome is reported. From then on one of three things is true, and the trainer is told which:

    no engine rank has begun to write, and none will: the old weights keep serving
    all engine ranks have written the new weights: the update has succeeded
    they had begun and have not come to their end in time: the weights are torn, and the engine knows it too

An engine that calls its own weights torn serves nothing, so that claim counts with any mark.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang_reshard.errors import EngineRefused, Mismatch, ReshardError, TornWeights
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput
from sglang_reshard.protocol.update_channel import ANSWER_S, WRITING, WRITTEN, EngineScope

_REVOKED = "The update was revoked; no engine rank had begun to write: the old weights keep serving"
_WRITTEN = "All engine ranks had already written the new weights"


@dataclass(frozen=True, slots=True)
class Settlement:
    """Settles the update of one engine.

    scope      the engine's
    timeout_s  how long engine ranks that have begun to write may take to end it
    if_torn    what the user is to do then
    """

    scope: EngineScope
    timeout_s: float
    if_torn: str

    def outcome(self, answer: DistributedUpdateWeightsOutput | Exception) -> DistributedUpdateWeightsOutput:
        """Returns the outcome if all engine ranks have written. Engine ranks then read no trainer memory.

        answer  the engine's, unless it is a success that the mark confirms, or why there is none

        Raises the reason, with the state of the weights, if no engine rank has begun to write, or if one has died after
        all have written; TornWeights if they do not end in time, or if the engine calls its weights torn.
        """
        scope, error = self.scope, self._problem(answer)
        standing = scope.revoke(f"trainer rank 0 gave up update {scope.update}: {error}")
        calls_itself_torn = isinstance(answer, DistributedUpdateWeightsOutput) and answer.torn
        if standing.mark == WRITING:
            if calls_itself_torn:
                scope.abort(str(error))  # those that still write end then
            standing = scope.until_written(self.timeout_s)
        if standing.mark != WRITTEN:
            scope.until_left(ANSWER_S)
        if calls_itself_torn:
            raise self._torn(str(error))
        if not standing.mark:
            if isinstance(answer, DistributedUpdateWeightsOutput) and not answer.success:
                raise EngineRefused(answer.message)  # which says that the old weights serve
            raise _explained(error, _REVOKED)
        if standing.mark == WRITING:
            raise self._torn(f"engine ranks had begun to write update {scope.update}: {standing.reason or error}")
        if standing.reason:  # an engine rank has died since
            raise _explained(error, _WRITTEN)
        said = "the engine's answer was lost" if error is answer else "the engine answered otherwise"
        found, remark = scope.get_outcome(ANSWER_S), f"{said} ({error}); the outcome comes from the control server"
        return msgspec.structs.replace(found, message="; ".join(filter(None, (found.message, remark))))

    def _problem(self, answer: DistributedUpdateWeightsOutput | Exception) -> Exception:
        """Returns why the answer is not the outcome, if it is not."""
        if isinstance(answer, Exception):
            return answer
        if not answer.success:
            return EngineRefused(answer.message)
        return Mismatch(
            f"engine {self.scope.engine} answered that update {self.scope.update} had succeeded before its ranks had "
            "written it; look at its log, and at proxies between it and trainer rank 0"
        )

    def _torn(self, why: str) -> TornWeights:
        return TornWeights(f"{why}. {self.if_torn}")


def _explained(error: Exception, what: str) -> ReshardError:
    """Returns the error with the outcome of the update, unless it contains it already."""
    if isinstance(error, TornWeights):
        return TornWeights(str(error))
    if isinstance(error, ReshardError):
        return type(error)(_sentences(str(error), what))
    return ReshardError(_sentences(f"{type(error).__name__}: {error}", what))


def _sentences(message: str, what: str) -> str:
    return f"{message}{' ' if message.endswith('?') else '. '}{what}"
