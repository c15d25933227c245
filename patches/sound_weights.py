"""Notes whether an engine's weights are sound, and why not: `request_gate.py` then refuses all requests.

    sound_weights.mark(manager, reason)    # torn: inside the update's lock, or after it with no await in between
    sound_weights.heal(manager)            # the same, after an update has succeeded
    sound_weights.loaded(manager)          # SGLang has loaded all weights, from disk
    sound_weights.released(manager)        # by release_memory_occupation
    sound_weights.written(manager)         # an update has written weights, ours or SGLang's
    request = sound_weights.told(manager, request)

with SGLang's tokenizer manager. *Torn* weights are of two versions: an update has failed while it wrote. A stock load
from disk heals if it fills every parameter, see `disk_loads`; SGLang's other updates may replace only some weights, and
do not. *Missing* ones are the dummy weights of the start, or released ones.

Engine ranks are told, who do not see what SGLang itself does: an update that leaves parameters as they are (`frozen=`,
`only=`) is refused where nothing has brought them, see `engine.unread`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import metrics, sglang_versions
from sglang_reshard.patches.attached import attached
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)
SERVE_DUMMY = "SGLANG_RESHARD_SERVE_DUMMY"


@dataclass
class Soundness:
    """Describes what SGLang and updates have done to the weights of one engine."""

    torn: str = ""  # why they are; empty if they are not
    continuing: int = 0  # calls of continue_generation in progress
    changes: tuple[int, bool] | None = None  # how often SGLang has changed them, and whether the last time was a load
    written: int = 0  # after how many of these changes an update has written weights


def mark(manager: TokenizerManager, reason: str) -> None:
    """Refuses all requests from now on with `reason`, which must not be empty."""
    if not reason:
        raise ValueError("a reason for the torn weights is required")
    logger.error("The weights are torn; requests are refused until an update succeeds: %s", reason)
    weights = attached(manager, Soundness)
    weights.torn = reason
    metrics.set_torn(manager, True)
    # A continue_generation call may have checked before this update began, and lift the pause after it.
    if weights.continuing and manager.is_pause:
        abort_all(manager)


def heal(manager: TokenizerManager) -> None:
    """Accepts requests again. Does nothing to an engine whose weights are not torn."""
    if torn(manager):
        logger.warning("The weights are complete again; requests are served")
    attached(manager, Soundness).torn = ""
    metrics.set_torn(manager, False)


def torn(manager: TokenizerManager) -> str:
    """Returns why the weights are torn; empty if they are not."""
    return attached(manager, Soundness).torn


@contextmanager
def continuing(manager: TokenizerManager) -> Iterator[None]:
    """Around a call of continue_generation: it aborts the requests that it would let go on if weights become torn."""
    weights = attached(manager, Soundness)
    weights.continuing += 1
    try:
        yield
    finally:
        weights.continuing -= 1


def abort_all(manager: TokenizerManager) -> None:
    """Aborts all requests in the schedulers. Retracts them first: an abort alone runs one more forward pass.

    The manager's own `abort_request` would, in 0.5.17, also abort those that wait in it, which are told why instead.
    """
    from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput

    sglang_versions.send_to_schedulers(manager, PauseGenerationReqInput(mode="retract"))
    sglang_versions.send_to_schedulers(manager, AbortReq(rid="", abort_all=True))


def loaded(manager: TokenizerManager) -> None:
    _change(manager, True)


def released(manager: TokenizerManager) -> None:
    """Notes that weights were released: their values are lost, unless SGLang keeps a copy, or releases nothing."""
    args = manager.server_args
    if getattr(args, "enable_memory_saver", False) and not getattr(args, "enable_weights_cpu_backup", False):
        _change(manager, False)


def written(manager: TokenizerManager) -> None:
    """Notes that an update has written weights. SGLang's own may have written some of them; it does not say which is
    the last one.
    """
    attached(manager, Soundness).written = _changes(manager)[0]
    if getattr(manager, "initial_weights_loaded", True) is False:  # its server waits for weights before it is ready
        manager.initial_weights_loaded = True


def missing(manager: TokenizerManager) -> str:
    """Returns why the engine has no weights that may answer a request; empty if it has."""
    changes, last = _changes(manager)
    weights = attached(manager, Soundness)
    if last or weights.written == changes or os.environ.get(SERVE_DUMMY) == "1":
        return ""
    if weights.changes is None:
        return (
            "the engine started on dummy weights, and no update has brought others yet; update it, or set "
            f"{SERVE_DUMMY}=1 in its environment to serve dummy weights"
        )
    return "the engine has released its weights, and no update has brought new ones since; update it"


def told(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsReq:
    """Returns the request with the fields that engine ranks need."""
    changes, last = _changes(manager)
    return msgspec.structs.replace(request, stock_changes=changes, stock_loaded=last)


def _change(manager: TokenizerManager, last: bool) -> None:
    attached(manager, Soundness).changes = _changes(manager)[0] + 1, last


def _changes(manager: TokenizerManager) -> tuple[int, bool]:
    if (known := attached(manager, Soundness).changes) is not None:
        return known
    dummy = getattr(manager.server_args, "load_format", "auto") == "dummy"  # as the engine has started
    return (1, False) if dummy else (0, True)
