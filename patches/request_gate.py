"""Refuses requests while an engine has no sound weights, and reports why.

    TornWeights       an update has failed while it wrote
    WeightsMissing    the engine started on dummy weights, or released its weights, and nothing has brought any since,
                      unless SGLANG_RESHARD_SERVE_DUMMY=1

Every request passes SGLang's tokenizer manager. It is checked three times there, because the weights can be lost before
any of them: on arrival, after it has waited for a pause or an update to end, and when it is sent to the schedulers.
`http_server.py` turns the error into an HTTP 503. A request that has to wait anyway, since the engine is paused or
updated, is not refused for missing weights on arrival: the update may bring them.

Requests that are paused in the schedulers are aborted before the pause is lifted, and keep the tokens they have from
the old weights. Control requests keep working.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_reshard.errors import ReshardError, TornWeights, WeightsMissing
from sglang_reshard.patches import sglang_versions, sound_weights, weights_info

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


@dataclass
class HttpRequest:
    """The state of one HTTP request. `refusal` is why it was refused; None if it was not."""

    refusal: ReshardError | None = None


# Set by the server for each request, because endpoints differ in the answer they make of an error.
http_request: ContextVar[HttpRequest | None] = ContextVar("sglang_reshard_http_request", default=None)


def refusal(manager: TokenizerManager) -> ReshardError | None:
    """Returns why requests are refused; None while the weights are sound, and for the first request of a server."""
    if torn := sound_weights.torn(manager):
        return TornWeights(torn)
    if (missing := sound_weights.missing(manager)) and not _warms_up(manager):
        return WeightsMissing(missing)
    return None


def refuse_on_arrival(manager: TokenizerManager, *_: Any, **__: Any) -> None:
    found = refusal(manager)
    waits = manager.is_pause or weights_info.under_way(manager)
    if found is not None and not (waits and isinstance(found, WeightsMissing)):
        _raise(found)


def refuse_registered(manager: TokenizerManager, batch: Any, *_: Any, **__: Any) -> None:
    """Refuses requests that the manager has registered already: unless sent, they would stay registered forever."""
    if (found := refusal(manager)) is not None:
        sglang_versions.drop_unsent_requests(manager, _request_ids(batch))
        _raise(found)


def _raise(found: ReshardError) -> NoReturn:
    if request := http_request.get():
        request.refusal = found
    raise found


def _warms_up(manager: TokenizerManager) -> bool:
    """Returns whether a server is starting: SGLang's own first request may come, and its health endpoints answer 503.

    A server that waits for weights before it is ready sends that request when it has them.
    """
    if http_request.get() is None:  # an embedded engine has no first request, and no status
        return False
    starts = getattr(getattr(manager, "server_status", None), "name", "") == "Starting"
    return starts and getattr(manager, "initial_weights_loaded", True)


def _request_ids(batch: Any) -> Iterator[str]:
    for request in batch if isinstance(batch, list) else [batch]:
        yield from [request.rid] if isinstance(request.rid, str) else request.rid


async def continue_generation(
    stock: Callable[..., Awaitable[None]], manager: TokenizerManager, *args: Any, **kwargs: Any
) -> None:
    with sound_weights.continuing(manager):
        async with manager.is_pause_cond:  # wait for an update in progress, whose outcome decides
            if refusal(manager) is not None:
                sound_weights.abort_all(manager)
        await stock(manager, *args, **kwargs)
