"""sglang.srt.entrypoints.http_server: adds endpoints to a server, and a middleware for requests that are refused.

    POST /update_weights_distributed    an update
    POST /pull_weights                  take the live weights of another server, see `weights_sharing`
    POST /share_weights                 the request that such a server makes of the other one
    GET  /weights_info                  which weights are live
    POST /load_snapshot                 load a snapshot of a folder, unless later weights are live
    POST /record_probe                  what a trainer's probe has found, for the metrics
    503                                 in place of any answer that depends on torn or missing weights

Their client is `sglang_reshard.protocol.server_client`. All require the admin key, or the API key if there is no admin
key, as SGLang's own control endpoints do.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.layout.decoders import from_json
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.patches import metrics, request_gate, weights_info
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    LoadSnapshotReq,
    PullWeightsReq,
    ShareWeightsReq,
)
from sglang_reshard.protocol.session import LOOPBACK
from sglang_reshard.protocol.validation import check_limit, check_pull_request, check_transport

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")
Answer = Callable[["Request"], Awaitable["Response"]]
Told = Callable[[ReshardError], "Response"]
logger = logging.getLogger(__name__)

_PATH = "/update_weights_distributed"
_MAX_BODY_BYTES = 64 * 2**20
_SHOWN_CHARACTERS = 300  # of what is wrong with a request: it may quote the request
_HEALTH = ("/health", "/health_generate")


def extend(_result: Any, manager: TokenizerManager, *_: Any, **__: Any) -> None:
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", None) == _PATH for route in server.app.routes):
        return
    _add_routes(server.app, manager)
    if server.app.middleware_stack is None:
        server.app.add_middleware(RefusalMiddleware, manager=manager)
    else:
        logger.warning("The server is already running, so it answers 500 instead of 503 while it has no sound weights")


def _add_routes(app: Any, manager: TokenizerManager) -> None:
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.responses import Response

    from sglang_reshard.patches import snapshot_loads, weights_sharing  # a scheduler needs none of what they import

    def response(message: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
        return Response(msgspec.json.encode(message), status_code=status, media_type="application/json")

    def outcome(output: DistributedUpdateWeightsOutput) -> Response:
        return response(output, HTTPStatus.OK if output.success else HTTPStatus.BAD_REQUEST)

    def refused(error: ReshardError) -> Response:
        return outcome(DistributedUpdateWeightsOutput(success=False, message=str(error)))

    def failed(error: ReshardError) -> Response:
        status = HTTPStatus.BAD_REQUEST
        return response({"error": {"message": str(error), "type": type(error).__name__, "code": status.value}}, status)

    async def update_weights_distributed(request: Request) -> Response:
        message = await _message(request, DistributedUpdateWeightsReq)
        return outcome(await manager.update_weights_distributed(message))

    async def pull_weights(request: Request) -> Response:
        message = await _message(request, PullWeightsReq, check_pull_request)
        pulled = await _while_connected(request, weights_sharing.pull(manager, message))
        return outcome(pulled) if pulled else response(None, HTTPStatus.BAD_REQUEST)

    async def share_weights(request: Request) -> Response:
        message = await _message(request, ShareWeightsReq, lambda asked: check_transport(asked.transport))
        address, _port = request.scope.get("server") or (LOOPBACK, 0)  # at which the client has reached this host
        return response(await weights_sharing.share(manager, message, str(address)))

    async def load_snapshot(request: Request) -> Response:
        message = await _message(request, LoadSnapshotReq, check_limit)
        loaded = await _while_connected(request, snapshot_loads.load(manager, message))
        return response(loaded, HTTPStatus.OK if loaded else HTTPStatus.BAD_REQUEST)

    async def get_weights_info(_request: Request) -> Response:
        return response(weights_info.current(manager))

    async def record_probe(request: Request) -> Response:
        metrics.observe_probe(manager, await _message(request, ProbeSummary))
        return response(None)

    def add(
        path: str, answer: Answer, kind: type[ReshardError] = Mismatch, told: Told = refused, by: str = "POST"
    ) -> None:
        """`told`: what a client gets for an error of this kind."""

        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def endpoint(request: Request) -> Response:
            try:
                return await answer(request)
            except kind as error:
                return told(error)

        app.add_route(path, endpoint, methods=[by])

    add(_PATH, update_weights_distributed)
    add("/pull_weights", pull_weights)
    add("/share_weights", share_weights, ReshardError, failed)
    add("/load_snapshot", load_snapshot, ReshardError, failed)
    add("/weights_info", get_weights_info, by="GET")
    add("/record_probe", record_probe)


async def _message(request: Request, kind: type[T], check: Callable[[T], None] = lambda _: None) -> T:
    """Returns the body of a request. Raises Mismatch unless it is a `kind` that passes `check`, and all there."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise Mismatch(f"malformed request: its body exceeds {_MAX_BODY_BYTES:,} bytes")
        message = from_json(bytes(body), kind)
    except msgspec.MsgspecError as error:
        raise Mismatch(f"malformed request: {str(error)[:_SHOWN_CHARACTERS]}") from error
    except ClientDisconnect as error:
        raise Mismatch("malformed request: the client disconnected before its end") from error
    check(message)
    return message


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`. Cancels it and returns None if the client disconnects first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RefusalMiddleware:
    """Answers HTTP 503 with the reason when an endpoint raises TornWeights or WeightsMissing.

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
            return
        request = request_gate.HttpRequest()
        request_gate.http_request.set(request)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _HEALTH and (refusal := request_gate.refusal(self._manager)) is not None:
            await _refuse(refusal, send)  # they ignore the outcome of the request they make
        else:
            await self._watch(request, scope, receive, send)

    async def _watch(self, request: request_gate.HttpRequest, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message | None = None
        started = refused = False

        async def send_unless_refused(message: Message) -> None:
            nonlocal start, started, refused
            if refused:
                return
            if request.refusal is not None and not started:
                refused = True
                await _refuse(request.refusal, send)
            elif message["type"] == "http.response.start":
                start = message
            else:
                if start is not None:
                    held_back, start, started = start, None, True
                    await send(held_back)
                await send(message)

        try:
            await self.app(scope, receive, send_unless_refused)
        except Exception:
            if started or request.refusal is None:
                raise
            if not refused:
                await _refuse(request.refusal, send)


async def _refuse(refusal: ReshardError, send: Send) -> None:
    status = HTTPStatus.SERVICE_UNAVAILABLE
    error = {"message": str(refusal), "type": type(refusal).__name__, "code": status.value}
    body = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
