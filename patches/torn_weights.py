"""Remembers that an engine's weights are torn, and why: `request_gate.py` then refuses all requests.

An update that fails while it writes leaves weights of two versions in the engine. The code that detects this calls

    torn_weights.mark(manager, reason)    # inside the update's lock, or after it with no await in between
    torn_weights.heal(manager)            # the same, after an update has succeeded

with SGLang's tokenizer manager. A stock load from disk heals if it fills every parameter, see `disk_loads`; SGLang's
other updates may replace only some weights, and do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import metrics, sglang_versions
from sglang_reshard.patches.attached import attached

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)


@dataclass
class Torn:
    """Why the weights are torn, or empty; and the number of continue_generation calls in progress."""

    reason: str = ""
    continuing: int = 0


def mark(manager: TokenizerManager, reason: str) -> None:
    """Refuses all requests from now on with `reason`, which must not be empty."""
    if not reason:
        raise ValueError("a reason for the torn weights is required")
    logger.error("The weights are torn; requests are refused until an update succeeds: %s", reason)
    torn = attached(manager, Torn)
    torn.reason = reason
    metrics.set_torn(manager, True)
    # A continue_generation call may have checked before this update began, and lift the pause after it.
    if torn.continuing and manager.is_pause:
        abort_all(manager)


def heal(manager: TokenizerManager) -> None:
    """Accepts requests again. Does nothing to an engine whose weights are sound."""
    if reason(manager):
        logger.warning("The weights are complete again; requests are served")
    attached(manager, Torn).reason = ""
    metrics.set_torn(manager, False)


def reason(manager: TokenizerManager) -> str:
    """Returns why requests are refused; empty if the weights are sound."""
    return attached(manager, Torn).reason


@contextmanager
def continuing(manager: TokenizerManager) -> Iterator[None]:
    """Around a call of continue_generation: it aborts the requests that it would let go on if weights become torn."""
    torn = attached(manager, Torn)
    torn.continuing += 1
    try:
        yield
    finally:
        torn.continuing -= 1


def abort_all(manager: TokenizerManager) -> None:
    """Aborts all requests in the schedulers. Retracts them first: an abort alone runs one more forward pass."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    sglang_versions.send_to_schedulers(manager, PauseGenerationReqInput(mode="retract"))
    manager.abort_request(abort_all=True)
