"""A server that runs on its own, reached by its URL: what `sglang.Engine` does, over HTTP.

    engine = RemoteEngine("http://gpu7:30000", admin_api_key="...")    # in one process
    engine.check()                                                     # there, ours to use, and of our version?
    engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 8})

`WeightSender(url)` and `VerlEngine(backend="server", url=url)` have one on trainer rank 0.
"""

from __future__ import annotations

import os
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_reshard.errors import EngineRefused, Mismatch, TornWeights, Unauthorized, Unsupported
from sglang_reshard.protocol.messages import (
    DEFAULT_TIMEOUT_S,
    WAITS,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    PauseMode,
    as_list,
)
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.version import __version__

if TYPE_CHECKING:
    import httpx

URL, API_KEY, ADMIN_API_KEY = "SGLANG_RESHARD_URL", "SGLANG_RESHARD_API_KEY", "SGLANG_RESHARD_ADMIN_API_KEY"

_CONNECT_S = 10.0
_SAID = 300  # characters of an answer that an error repeats


class RemoteEngine:
    """A server, as one client. Keeps no connection open. Safe to use from several threads.

    url            http://host:port; by default what the environment's SGLANG_RESHARD_URL says
    api_key        the server's --api-key, if it has one; by default SGLANG_RESHARD_API_KEY
    admin_api_key  the server's --admin-api-key, if it has one; by default SGLANG_RESHARD_ADMIN_API_KEY. Updates and
                   all control need it; generating does not
    timeout_s      of an update; any call may last `WAITS` times as long

    Every call raises EngineRefused for a server that cannot be reached, does not answer in time or refuses,
    Unauthorized for a wrong key, and Unsupported for a server without this package.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.url = _checked(url or os.environ.get(URL, ""))
        key = os.environ.get(API_KEY, "") if api_key is None else api_key
        admin_key = os.environ.get(ADMIN_API_KEY, "") if admin_api_key is None else admin_api_key
        self._serving, self._control = headers(key, admin_key)
        self._client = client(WAITS * timeout_s)

    def check(self) -> WeightsInfo:
        """What the server says of its weights. Raises Mismatch unless it has this package in this version."""
        info = self.weights_info()
        if info.package_version != __version__:
            raise Mismatch(
                f"{self.url} has sglang-reshard {info.package_version} and this trainer {__version__}; install the "
                "same version on both"
            )
        return info

    def weights_info(self) -> WeightsInfo:
        """Which weights are live on the server, see `WeightsInfo`."""
        answer = self._ask("GET", "/weights_info")
        try:
            return msgspec.json.decode(answer.content, type=WeightsInfo)
        except msgspec.MsgspecError as error:
            raise Mismatch(
                f"{self.url}/weights_info answered what is no such information ({error}): {_said(answer)}. Is this the "
                f"URL of an SGLang server, with sglang-reshard {__version__}?"
            ) from error

    def update_weights_distributed(self, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        """What `WeightSender` asks for; whether it succeeded is in the answer."""
        answer = self._answer("POST", "/update_weights_distributed", request)
        try:
            return msgspec.json.decode(answer.content, type=DistributedUpdateWeightsOutput)
        except msgspec.MsgspecError:
            self._raise_unless_good(answer)
            raise EngineRefused(f"{self.url} answered what is no outcome of an update: {_said(answer)}") from None

    def generate(self, prompt: list[str] | str | None = None, **arguments: Any) -> Any:
        """SGLang's `Engine.generate`, with its arguments; lists come back for tuples. Raises TornWeights.

        Images are URLs, paths on the server's host or base64: others cannot go over HTTP, which is Unsupported.
        """
        body = {"text": prompt, **arguments}
        given = {name: value for name, value in body.items() if value is not None}
        return msgspec.json.decode(self._ask("POST", "/generate", given, self._serving).content)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Let go of the memory of "weights", of "kv_cache", or of all; requests must have ended."""
        self._ask("POST", "/release_memory_occupation", {"tags": tags})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._ask("POST", "/resume_memory_occupation", {"tags": tags})

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop generating; "abort" ends all requests, "retract" and "in_place" keep them for `continue_generation`."""
        self._ask("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self) -> None:
        self._ask("POST", "/continue_generation", {})

    def flush_cache(self) -> None:
        """Forget all prefixes. Raises EngineRefused while requests run."""
        self._ask("POST", "/flush_cache")

    def close(self) -> None:
        """Of this client; the server goes on."""
        self._client.close()

    def local_address(self) -> str:
        """The address of this host from which it reaches the server: by which the server's host reaches this one."""
        from httpx import URL as ParsedURL

        url = ParsedURL(self.url)
        try:
            family, *_, target = socket.getaddrinfo(url.host, url.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # which sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise EngineRefused(
                f"there is no way from this host to {self.url}: {error}; is the host's name right?"
            ) from error

    def _ask(self, method: str, path: str, body: Any = None, shown: dict[str, str] | None = None) -> httpx.Response:
        answer = self._answer(method, path, body, shown)
        self._raise_unless_good(answer)
        return answer

    def _answer(self, method: str, path: str, body: Any = None, shown: dict[str, str] | None = None) -> httpx.Response:
        """`shown` are the headers with a key; those that control asks for when not given."""
        import httpx

        sent = {"Content-Type": "application/json", **(self._control if shown is None else shown)}
        try:
            content = b"" if body is None else msgspec.json.encode(body, enc_hook=as_list)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise Unsupported(f"{path}: an argument cannot go over HTTP: {error}") from error
        try:
            return self._client.request(method, self.url + path, content=content, headers=sent)
        except httpx.HTTPError as error:
            raise EngineRefused(
                f"{self.url} did not answer: {type(error).__name__}: {error}. Is the server up, and is this its URL?"
            ) from error

    def _raise_unless_good(self, answer: httpx.Response) -> None:
        status, path = answer.status_code, answer.request.url.path
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise Unauthorized(
                f"{self.url}{path} did not accept the key ({status}). Give what the server was started with: its "
                f"--api-key as api_key or {API_KEY}, its --admin-api-key as admin_api_key or {ADMIN_API_KEY}"
            )
        if status == HTTPStatus.NOT_FOUND:
            raise Unsupported(
                f"{self.url} has no {path} (404): is sglang-reshard installed beside SGLang there? Install "
                f"{__version__} and start the server anew. If it is, look for 'Failed to load plugin reshard' in the "
                "server's log, and for 'cannot update its weights', which names a mode that has no place for plugins; "
                "and see that SGLANG_PLUGINS, if it is set there, names 'reshard'"
            )
        if answer.is_success:
            return
        if _kind(answer) == TornWeights.__name__:
            raise TornWeights(_said(answer))
        raise EngineRefused(f"{self.url}{path} answered {status}: {_said(answer)}")


def client(timeout_s: float) -> httpx.Client:
    """For an engine's server; keeps no connection open."""
    import httpx

    return httpx.Client(
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
        # The environment's proxies are for the world outside; an engine is not there.
        trust_env=False,
        # Its certificates (SSL_CERT_FILE) may be. And a connection that idles may be closed by the server in the
        # moment in which it is used again.
        transport=httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0)),
    )


def headers(api_key: str, admin_api_key: str) -> tuple[dict[str, str], dict[str, str]]:
    """With which a server's key is shown: for what serves, and for control.

    Where a server has one key only, it asks for that one, or for none.
    """
    return _bearer(api_key or admin_api_key), _bearer(admin_api_key or api_key)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""


class _Refusal(msgspec.Struct):
    error: _Error


def _refusal(answer: httpx.Response) -> _Error | None:
    """As SGLang and this package word errors; None for other words."""
    try:
        return msgspec.json.decode(answer.content, type=_Refusal).error
    except msgspec.MsgspecError:
        return None


def _kind(answer: httpx.Response) -> str:
    refusal = _refusal(answer)
    return refusal.type if refusal else ""


def _said(answer: httpx.Response) -> str:
    refusal = _refusal(answer)
    return refusal.message if refusal else repr(answer.text[:_SAID])


def _checked(url: str) -> str:
    import httpx

    if not url:
        raise Unsupported(f"which server? Give its URL, http://host:port, or set {URL}")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise Unsupported(f"{url!r} is no URL: {error}; give http://host:port") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise Unsupported(f"{url!r} is no URL of a server; give http://host:port")
    return url.rstrip("/")
