"""sglang.srt.entrypoints.http_server: adds endpoints to a server, and a middleware for torn weights.

    POST /update_weights_distributed    an update
    POST /pull_weights                  take the live weights of another server, see `weights_sharing`
    POST /share_weights                 the request that such a server makes of the other one
    GET  /weights_info                  which weights are live
    POST /load_snapshot                 load a snapshot of a folder, unless later weights are live
    POST /record_probe                  what a trainer's probe has found, for the metrics
    503                                 in place of any answer that depends on torn weights

Their client is `sglang_reshard.protocol.server_client`. All require the admin key, or the API key if there is no admin
key, as SGLang's own control endpoints do.
"""

from __future__ import annotations

import logging
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.decoders import json_decoder
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.patches import metrics, snapshot_loads, torn_weights, weights_info
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    LoadSnapshotReq,
    PullWeightsReq,
    ShareWeightsReq,
)
from sglang_reshard.protocol.session import LOOPBACK

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_PATH, _INFO = "/update_weights_distributed", "/weights_info"
_PULL, _SHARE, _PROBE, _LOAD = "/pull_weights", "/share_weights", "/record_probe", "/load_snapshot"
_HEALTH = ("/health", "/health_generate")


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # A hook on the server's module would import it, and FastAPI with it, in every scheduler. A process that may be a
    # server has a tokenizer manager.
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
        server.app.add_middleware(TornWeightsMiddleware, manager=manager)
    else:
        logger.warning("The server is already running: it will answer 500 instead of 503 while its weights are torn")


def _add_routes(app: Any, manager: TokenizerManager) -> None:
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.responses import Response

    from sglang_reshard.patches import weights_sharing  # a scheduler needs none of what it imports

    def response(message: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
        return Response(msgspec.json.encode(message), status_code=status, media_type="application/json")

    def outcome(output: DistributedUpdateWeightsOutput) -> Response:
        return response(output, HTTPStatus.OK if output.success else HTTPStatus.BAD_REQUEST)

    def refused(error: Exception) -> Response:
        status = HTTPStatus.BAD_REQUEST
        return response({"error": {"message": str(error), "type": type(error).__name__, "code": status.value}}, status)

    def malformed(error: msgspec.MsgspecError) -> DistributedUpdateWeightsOutput:
        return DistributedUpdateWeightsOutput(success=False, message=f"malformed request: {error}")

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def update_weights_distributed(request: Any) -> Response:
        try:
            message = json_decoder(DistributedUpdateWeightsReq).decode(await request.body())
        except msgspec.MsgspecError as error:
            return outcome(malformed(error))
        return outcome(await manager.update_weights_distributed(message))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def pull_weights(request: Any) -> Response:
        try:
            message = json_decoder(PullWeightsReq).decode(await request.body())
        except msgspec.MsgspecError as error:
            return outcome(malformed(error))
        return outcome(await weights_sharing.pull(manager, message))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def share_weights(request: Any) -> Response:
        try:
            message = json_decoder(ShareWeightsReq).decode(await request.body())
            return response(await weights_sharing.share(manager, message, _interface(request)))
        except (msgspec.MsgspecError, ReshardError) as error:
            return refused(error)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def load_snapshot(request: Any) -> Response:
        try:
            message = json_decoder(LoadSnapshotReq).decode(await request.body())
            return response(await snapshot_loads.load(manager, message))
        except (msgspec.MsgspecError, ReshardError) as error:
            return refused(error)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def get_weights_info(_request: Any) -> Response:
        return response(weights_info.current(manager))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def record_probe(request: Any) -> Response:
        try:
            metrics.observe_probe(manager, json_decoder(ProbeSummary).decode(await request.body()))
        except msgspec.MsgspecError as error:
            return outcome(malformed(error))
        return response(None)

    app.add_route(_LOAD, load_snapshot, methods=["POST"])
    app.add_route(_PROBE, record_probe, methods=["POST"])
    app.add_route(_PATH, update_weights_distributed, methods=["POST"])
    app.add_route(_PULL, pull_weights, methods=["POST"])
    app.add_route(_SHARE, share_weights, methods=["POST"])
    app.add_route(_INFO, get_weights_info, methods=["GET"])


class TornWeightsMiddleware:
    """Answers HTTP 503 with the reason in place of what an endpoint makes of TornWeights.

    {"error": {"message": reason, "type": "TornWeights", "code": 503}}

    The status line is held back until the first byte of the body. A streaming endpoint sends it before it has requested
    a token, and the request may be refused only after a wait.
    """

    def __init__(self, app: ASGIApp, manager: TokenizerManager) -> None:
        self.app = app
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (reason := torn_weights.reason(self._manager)) and _path(scope) in _HEALTH:
            await _refuse(reason, send)  # they ignore the outcome of the request they make
        else:
            await self._watch(scope, receive, send)

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = torn_weights.HttpRequest()
        torn_weights.http_request.set(request)
        start: Message | None = None
        started = refused = False

        async def send_unless_torn(message: Message) -> None:
            nonlocal start, started, refused
            if refused:
                return
            if request.torn_reason and not started:
                refused = True
                await _refuse(request.torn_reason, send)
            elif message["type"] == "http.response.start":
                start = message
            else:
                if start is not None:
                    held_back, start, started = start, None, True
                    await send(held_back)
                await send(message)

        try:
            await self.app(scope, receive, send_unless_torn)
        except Exception:
            if started or not request.torn_reason:
                raise
            if not refused:
                await _refuse(request.torn_reason, send)


def _interface(request: Any) -> str:
    """Returns the address of this host at which the client of an HTTP request has reached it."""
    address, _port = request.scope.get("server") or (LOOPBACK, 0)
    return str(address)


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


async def _refuse(reason: str, send: Send) -> None:
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"error": {"message": reason, "type": "TornWeights", "code": status.value}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
