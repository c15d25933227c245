"""Ends an engine's update that has no answer, or that failed, on trainer rank 0.

The answer may be lost while the request is not: the engine may begin later, or be writing already. So the update is
revoked before an outcome is reported. From then on one of three things is true, and the trainer is told which:

    no engine rank has begun to write, and none will: the old weights keep serving
    all engine ranks have written the new weights: the update has succeeded
    they had begun and have not come to their end in time: the weights are torn, and the engine knows it too
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang_reshard.errors import EngineRefused, ReshardError, TornWeights
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

    def without_answer(self, error: Exception) -> DistributedUpdateWeightsOutput:
        """Revokes the update; `error` is why there is no answer. Returns its outcome if all engine ranks have written.

        Raises `error`, with the state of the weights, if none has begun; TornWeights if they do not end in time.
        """
        scope = self.scope
        standing = scope.revoke(f"trainer rank 0 gave up update {scope.update}: {error}")
        if not standing.mark:
            scope.until_left(ANSWER_S)
            raise _explained(error, _REVOKED) from error
        if standing.mark == WRITING:
            standing = scope.until_written(self.timeout_s)
        if standing.mark == WRITTEN and standing.reason:  # an engine rank has died since
            raise _explained(error, _WRITTEN) from error
        if standing.mark == WRITTEN:
            found = scope.get_outcome(ANSWER_S)
            lost = f"the engine's answer was lost ({error}); the outcome comes from the control server"
            return msgspec.structs.replace(found, message="; ".join(filter(None, (found.message, lost))))
        raise self._torn(f"engine ranks had begun to write update {scope.update}: {standing.reason or error}")

    def failed(self, output: DistributedUpdateWeightsOutput) -> ReshardError:
        """Revokes an update that the engine has reported as failed. Returns the error to raise.

        If some of its processes do not answer in time, an engine reports a failure, too: they may go on.
        """
        standing = self.scope.revoke(f"engine {self.scope.engine} reported a failure: {output.message}")
        if standing.mark == WRITING and not output.torn:
            standing = self.scope.until_written(self.timeout_s)
        if output.torn or standing.mark == WRITING:
            return self._torn(output.message)
        return EngineRefused(output.message)

    def _torn(self, why: str) -> TornWeights:
        return TornWeights(f"{why}. {self.if_torn}")


def _explained(error: Exception, what: str) -> ReshardError:
    """Returns the error with the outcome of the update, unless it contains it already."""
    if isinstance(error, TornWeights):
        return error
    if isinstance(error, ReshardError):
        return type(error)(_sentences(str(error), what))
    return ReshardError(_sentences(f"{type(error).__name__}: {error}", what))


def _sentences(message: str, what: str) -> str:
    return f"{message}{' ' if message.endswith('?') else '. '}{what}"
