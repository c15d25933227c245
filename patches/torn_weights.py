"""Refuses all requests while an engine's weights are torn, and reports why.

An update that fails while it writes leaves weights of two versions in the engine. The code that detects this calls

    torn_weights.mark(manager, reason)    # inside the update's lock, or after it with no await in between
    torn_weights.heal(manager)            # the same, after an update has succeeded

with SGLang's tokenizer manager, which every request passes. A request is checked three times, because weights can
become torn before any of them: on arrival, after it has waited for a pause or an update to end, and when it is sent to
the schedulers. It fails with TornWeights(reason), which `http_server.py` turns into an HTTP 503. Requests that are
paused in the schedulers are aborted before the pause is lifted, and keep the tokens they have from the old weights.

Control requests keep working. A stock load from disk replaces every weight, and so heals too; SGLang's other updates
may replace only some weights, and do not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import TornWeights
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import metrics, sglang_versions, stock_weights

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)

_REASON = "_reshard_torn"
_CONTINUING = "_reshard_continuing"  # number of continue_generation calls in progress
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


@dataclass
class HttpRequest:
    """The state of one HTTP request. `torn_reason` is why it was refused; empty if it was not."""

    torn_reason: str = ""


# Set by the server for each request, because endpoints differ in the answer they make of TornWeights.
http_request: ContextVar[HttpRequest | None] = ContextVar("sglang_reshard_http_request", default=None)


def mark(manager: TokenizerManager, reason: str) -> None:
    """Refuses all requests from now on with `reason`, which must not be empty."""
    if not reason:
        raise ValueError("a reason for the torn weights is required")
    logger.error("The weights are torn; requests are refused until an update succeeds: %s", reason)
    setattr(manager, _REASON, reason)
    metrics.set_torn(manager, True)
    # A continue_generation call may have checked before this update began, and lift the pause after it.
    if getattr(manager, _CONTINUING, 0) and manager.is_pause:
        abort_all(manager)


def heal(manager: TokenizerManager) -> None:
    """Accepts requests again. Does nothing to an engine whose weights are sound."""
    if reason(manager):
        logger.warning("The weights are complete again; requests are served")
    setattr(manager, _REASON, "")
    metrics.set_torn(manager, False)


def reason(manager: TokenizerManager) -> str:
    """Returns why requests are refused; empty if the weights are sound."""
    return getattr(manager, _REASON, "")


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}._init_req_state", _refuse, HookType.BEFORE)
    for method in ("_validate_and_resolve_lora", "_send_one_request", "_send_batch_request"):
        HookRegistry.register(f"{_MANAGER}.{method}", _refuse_registered, HookType.BEFORE)
    HookRegistry.register(f"{_MANAGER}.continue_generation", _continue_generation, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}._wait_for_model_update_from_disk", _update_from_disk, HookType.AROUND)


def _refuse(manager: TokenizerManager, *_: Any, **__: Any) -> None:
    if torn_reason := reason(manager):
        if request := http_request.get():
            request.torn_reason = torn_reason
        raise TornWeights(torn_reason)


def _refuse_registered(manager: TokenizerManager, batch: Any, *_: Any, **__: Any) -> None:
    """Refuses requests that the manager has registered already: unless sent, they would stay registered forever."""
    try:
        _refuse(manager)
    except TornWeights:
        sglang_versions.drop_unsent_requests(manager, _request_ids(batch))
        raise


def _request_ids(batch: Any) -> Iterator[str]:
    for request in batch if isinstance(batch, list) else [batch]:
        yield from [request.rid] if isinstance(request.rid, str) else request.rid


async def _continue_generation(
    stock: Callable[..., Awaitable[None]], manager: TokenizerManager, *args: Any, **kwargs: Any
) -> None:
    setattr(manager, _CONTINUING, getattr(manager, _CONTINUING, 0) + 1)
    try:
        async with manager.is_pause_cond:  # wait for an update in progress, whose outcome decides
            if reason(manager):
                abort_all(manager)
        await stock(manager, *args, **kwargs)
    finally:
        setattr(manager, _CONTINUING, getattr(manager, _CONTINUING) - 1)


def abort_all(manager: TokenizerManager) -> None:
    """Aborts all requests in the schedulers. Retracts them first: an abort alone runs one more forward pass."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    sglang_versions.send_to_schedulers(manager, PauseGenerationReqInput(mode="retract"))
    manager.abort_request(abort_all=True)


async def _update_from_disk(
    stock: Callable[..., Awaitable[tuple[bool, Any, Any]]], manager: TokenizerManager, *args: Any, **kwargs: Any
) -> tuple[bool, Any, Any]:
    outcome = await stock(manager, *args, **kwargs)
    if outcome[0]:
        heal(manager)
        stock_weights.loaded(manager)
    return outcome
