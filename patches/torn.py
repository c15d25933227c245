"""While an engine's weights are torn, no request computes with them, and everybody who asks is told why.

An update that breaks off half-way leaves weights of two versions in the engine. The one who sees that calls

    torn.mark(manager, reason)    # inside the update's lock, or after it with no await in between
    torn.heal(manager)            # likewise, once an update has succeeded

with SGLang's tokenizer manager, which every request passes. A request is looked at three times, because weights can
tear at any of them: when it comes, when it has waited for a pause or an update to end, and when it is sent to the
schedulers. It gets TornWeights(reason); `http_server.py` makes an HTTP 503 of that. What sits in the schedulers
already, paused, is aborted before the pause is lifted, and keeps the tokens that it had from the old weights.

Control requests go on working. A stock load from disk replaces every weight and heals too; stock's other updates
may replace some weights only, and do not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import TornWeights
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import metrics, versions

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)

_REASON = "_reshard_torn"
_LIFTING = "_reshard_lifting"  # calls of continue_generation that are under way
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


@dataclass
class Exchange:
    """One HTTP request and its answer. `torn` is why the request was refused; empty if it was not."""

    torn: str = ""


# Set by the server for each request: what an endpoint makes of TornWeights is its own affair, and differs.
exchange: ContextVar[Exchange | None] = ContextVar("sglang_reshard_exchange", default=None)


def mark(manager: TokenizerManager, reason: str) -> None:
    """Refuse all requests from now on, with this reason, which must not be empty."""
    if not reason:
        raise ValueError("say why the weights are torn")
    logger.error("The weights are torn, and no request is served until an update succeeds: %s", reason)
    setattr(manager, _REASON, reason)
    metrics.show_torn(manager, True)
    # A call of continue_generation may have looked before this update began, and lift the pause after it.
    if getattr(manager, _LIFTING, 0) and manager.is_pause:
        _abort_all(manager)


def heal(manager: TokenizerManager) -> None:
    """The weights are whole: serve again. Nothing happens to an engine that was sound."""
    if reason(manager):
        logger.warning("The weights are whole again; requests are served")
    setattr(manager, _REASON, "")
    metrics.show_torn(manager, False)


def reason(manager: TokenizerManager) -> str:
    """Why requests are refused; empty if the weights are sound."""
    return getattr(manager, _REASON, "")


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}._init_req_state", _refuse, HookType.BEFORE)
    for inside in ("_validate_and_resolve_lora", "_send_one_request", "_send_batch_request"):
        HookRegistry.register(f"{_MANAGER}.{inside}", _refuse_late, HookType.BEFORE)
    HookRegistry.register(f"{_MANAGER}.continue_generation", _continue, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}._wait_for_model_update_from_disk", _load, HookType.AROUND)


def _refuse(manager: TokenizerManager, *_: Any, **__: Any) -> None:
    if why := reason(manager):
        if asked := exchange.get():
            asked.torn = why
        raise TornWeights(why)


def _refuse_late(manager: TokenizerManager, asked: Any, *_: Any, **__: Any) -> None:
    """For requests that are on the manager's list already: none that was not sent would ever leave it."""
    try:
        _refuse(manager)
    except TornWeights:
        versions.forget_unsent(manager, _request_ids(asked))
        raise


def _request_ids(asked: Any) -> Iterator[str]:
    for one in asked if isinstance(asked, list) else [asked]:
        yield from [one.rid] if isinstance(one.rid, str) else one.rid


async def _continue(
    stock: Callable[..., Awaitable[None]], manager: TokenizerManager, *args: Any, **kwargs: Any
) -> None:
    setattr(manager, _LIFTING, getattr(manager, _LIFTING, 0) + 1)
    try:
        async with manager.is_pause_cond:  # an update that is under way decides whether they go on
            if reason(manager):
                _abort_all(manager)
        await stock(manager, *args, **kwargs)
    finally:
        setattr(manager, _LIFTING, getattr(manager, _LIFTING) - 1)


def _abort_all(manager: TokenizerManager) -> None:
    """End what the schedulers hold without another forward pass, which an abort alone gives a running request."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    versions.send(manager, PauseGenerationReqInput(mode="retract"))
    manager.abort_request(abort_all=True)


async def _load(
    stock: Callable[..., Awaitable[tuple[bool, Any, Any]]], manager: TokenizerManager, *args: Any, **kwargs: Any
) -> tuple[bool, Any, Any]:
    outcome = await stock(manager, *args, **kwargs)
    if outcome[0]:
        heal(manager)
    return outcome
