"""How trainer rank 0 reaches a server by its URL."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sglang_reshard.errors import EngineRefused
from sglang_reshard.messages import (
    DEFAULT_TIMEOUT_S,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
)

_PATH = "/update_weights_distributed"
_CONNECT_S = 10.0
WAITS = 8  # an update waits this often at most, each time for up to `timeout_s`


def http_send(
    url: str, *, api_key: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
) -> Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]:
    """The `send` of a `WeightSender` for a server at `url` (http://host:port) that has this package installed.

    api_key    the server's admin key, if it asks for one
    timeout_s  the update's

    The call raises EngineRefused for a server that cannot be reached, does not answer in time or has no such endpoint.
    """
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(WAITS * timeout_s, connect=_CONNECT_S)

    def send(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        body = msgspec.json.encode(request)
        try:
            # The environment's proxies are for the world outside; an engine is not there.
            with httpx.Client(timeout=timeout, trust_env=False) as client:
                answer = client.post(url.rstrip("/") + _PATH, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise EngineRefused(f"{url} did not answer: {type(error).__name__}: {error}") from error
        try:
            return msgspec.json.decode(answer.content, type=DistributedUpdateWeightsOutput)
        except msgspec.MsgspecError as error:
            raise EngineRefused(
                f"{url} answered {answer.status_code} {answer.text[:200]!r}; is sglang-reshard installed beside "
                "SGLang there (404), and is the admin key right (401)?"
            ) from error

    return send
