"""sglang.srt.entrypoints.http_server: what this package adds to a server.

    POST /update_weights_distributed    an update; the trainer's side of it is `sglang_reshard.api.remote_engine`
    GET  /weights_info                  which weights are live
    503                                 in place of any answer that torn weights would have a part in

Both ask for the admin key, or the API key where there is no admin key, as SGLang's own control endpoints do.
"""

from __future__ import annotations

import logging
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_reshard.patches import torn, weights_info
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_PATH, _INFO = "/update_weights_distributed", "/weights_info"
_HEALTH = ("/health", "/health_generate")


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The server's module is imported only where there is a server. Naming it here would import it,
    # and FastAPI with it, in every scheduler; a tokenizer manager exists where a server may.
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
        _extend,
        HookType.AFTER,
    )


def _extend(_result: Any, manager: TokenizerManager, *_: Any, **__: Any) -> None:
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", None) == _PATH for route in server.app.routes):
        return
    _add_routes(server.app, manager)
    if server.app.middleware_stack is None:
        server.app.add_middleware(TornAnswers, manager=manager)
    else:
        logger.warning("The server runs already: it will say 500 and not 503 while its weights are torn")


def _add_routes(app: Any, manager: TokenizerManager) -> None:
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.responses import Response

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def update_weights_distributed(request: Any) -> Response:
        try:
            message = msgspec.json.decode(await request.body(), type=DistributedUpdateWeightsReq)
        except msgspec.MsgspecError as error:
            output = DistributedUpdateWeightsOutput(success=False, message=f"malformed request: {error}")
        else:
            output = await manager.update_weights_distributed(message)
        status = HTTPStatus.OK if output.success else HTTPStatus.BAD_REQUEST
        return Response(msgspec.json.encode(output), status_code=status, media_type="application/json")

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def tell(_request: Any) -> Response:
        return Response(msgspec.json.encode(weights_info.of(manager)), media_type="application/json")

    app.add_route(_PATH, update_weights_distributed, methods=["POST"])
    app.add_route(_INFO, tell, methods=["GET"])


class TornAnswers:
    """Middleware: HTTP 503 with the reason in place of what an endpoint made of a refusal for torn weights.

    {"error": {"message": reason, "type": "TornWeights", "code": 503}}

    The status line waits for the first byte that follows it. A stream's endpoint sends it before it has asked
    for a token, and whether there will be one may be known only after a wait.
    """

    def __init__(self, app: ASGIApp, manager: TokenizerManager) -> None:
        self.app = app
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (reason := torn.reason(self._manager)) and _path(scope) in _HEALTH:
            await _refuse(reason, send)  # theirs is a request that they forget the outcome of
        else:
            await self._watch(scope, receive, send)

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = torn.Exchange()
        torn.exchange.set(asked)
        held: Message | None = None
        begun = refused = False

        async def send_unless_torn(message: Message) -> None:
            nonlocal held, begun, refused
            if refused:
                return
            if asked.torn and not begun:
                refused = True
                await _refuse(asked.torn, send)
            elif message["type"] == "http.response.start":
                held = message
            else:
                if held is not None:
                    first, held, begun = held, None, True
                    await send(first)
                await send(message)

        try:
            await self.app(scope, receive, send_unless_torn)
        except Exception:
            if begun or not asked.torn:
                raise
            if not refused:
                await _refuse(asked.torn, send)


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


async def _refuse(reason: str, send: Send) -> None:
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"error": {"message": reason, "type": "TornWeights", "code": status.value}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
