"""sglang.srt.entrypoints.http_server: POST /update_weights_distributed."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_PATH = "/update_weights_distributed"


def apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The server's module is imported only where there is a server. Naming it here would import it,
    # and FastAPI with it, in every scheduler; a tokenizer manager exists where a server may.
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
        _add_route,
        HookType.AFTER,
    )


def _add_route(_result: Any, manager: TokenizerManager, *_: Any, **__: Any) -> None:
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or any(getattr(route, "path", None) == _PATH for route in server.app.routes):
        return
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

    server.app.add_route(_PATH, update_weights_distributed, methods=["POST"])
