"""Calls this package's endpoints of an SGLang server over HTTP: updates, and requests about them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sglang_reshard.errors import (
    EngineRefused,
    EngineUnreachable,
    Mismatch,
    ReshardError,
    TornWeights,
    Unauthorized,
    Unsupported,
    WeightsMissing,
)
from sglang_reshard.layout.decoders import from_json
from sglang_reshard.nearest import check_names
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.protocol.messages import (
    DEFAULT_TIMEOUT_S,
    WAITS,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    PullGiven,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
    as_list,
)
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.version import __version__, check_same_protocol

if TYPE_CHECKING:
    import httpx
    from typing_extensions import Unpack

T = TypeVar("T")
_OF_PROXIES = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
# By what the server calls them.
_REFUSALS: dict[str, type[ReshardError]] = {kind.__name__: kind for kind in (TornWeights, WeightsMissing)}
URL, API_KEY, ADMIN_API_KEY = "SGLANG_RESHARD_URL", "SGLANG_RESHARD_API_KEY", "SGLANG_RESHARD_ADMIN_API_KEY"

_CONNECT_S = 10.0
_MAX_PORT = 65535
_SHOWN_CHARACTERS = 300  # of a response, in an error


class ServerClient:
    """A client of one server. Keeps no connection open. Safe to use from several threads.

    url            http://host:port; by default the environment variable SGLANG_RESHARD_URL
    api_key        the server's --api-key, if it has one; by default SGLANG_RESHARD_API_KEY
    admin_api_key  the server's --admin-api-key, if it has one; by default SGLANG_RESHARD_ADMIN_API_KEY. Needed for
                   all calls but `RemoteEngine.generate`
    timeout_s      seconds of a wait of an update; any call may last `WAITS` times as long

    Every call raises EngineUnreachable for a server that cannot be reached or does not answer in time, or for which a
    proxy answers, EngineRefused, its base class, for one that refuses, Unauthorized for a wrong key, and Unsupported
    for a server without this package.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.url = check_url(url or os.environ.get(URL, ""))
        self.api_key = os.environ.get(API_KEY, "") if api_key is None else api_key
        self.admin_api_key = os.environ.get(ADMIN_API_KEY, "") if admin_api_key is None else admin_api_key
        self._serving, self._control = headers(self.api_key, self.admin_api_key)
        self._client = client(WAITS * timeout_s)

    def check(self) -> WeightsInfo:
        """Returns `weights_info()`. Raises Mismatch unless the server has the protocol of this process."""
        info = self.weights_info()
        check_same_protocol(info.protocol, info.package_version, theirs=self.url, ours="this process")
        return info

    def weights_info(self) -> WeightsInfo:
        """Describes the weights that are live on the server."""
        return self._decoded(self._ask("GET", "/weights_info"), WeightsInfo)

    def update_weights_distributed(self, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        """Sends an update request of `WeightSender`, and returns the outcome, which may be a failure."""
        return self._outcome("/update_weights_distributed", request)

    def share_weights(self, request: ShareWeightsReq) -> SharedWeights:
        """Asks the server to pass its live weights on to one other, which joins the session that it returns."""
        return self._decoded(self._ask("POST", "/share_weights", request), SharedWeights)

    def pull_weights(
        self, url: str, *, api_key: str = "", admin_api_key: str = "", **options: Unpack[PullGiven]
    ) -> DistributedUpdateWeightsOutput:
        """Lets the server take the live weights of the one at `url`. Returns the outcome, which may be a failure.

        url, api_key, admin_api_key  of the other server, as this one reaches it
        options                      transport, bucket_bytes, timeout_s and verify, see `WeightSender`

        Neither needs a trainer. The other server keeps generating. Raises Mismatch for a transport or a verify that
        does not exist, and TypeError for another option, before anything is sent.
        """
        from sglang_reshard.protocol.validation import check_pull_request

        check_names("a pull", options, tuple(PullGiven.__annotations__))
        request = PullWeightsReq(url=url, api_key=api_key, admin_api_key=admin_api_key, **options)
        check_pull_request(request)
        return self._outcome("/pull_weights", request)

    def record_probe(self, summary: ProbeSummary) -> None:
        """Adds the outcome of a probe to the server's metrics. Does nothing on a server without --enable-metrics."""
        self._ask("POST", "/record_probe", summary)

    def close(self) -> None:
        """Closes this client; the server keeps running."""
        self._client.close()

    def local_address(self) -> str:
        """Returns the address of this host's interface towards the server, at which the server's host can reach it."""
        from httpx import URL as ParsedURL

        url = ParsedURL(self.url)
        try:
            family, *_, target = socket.getaddrinfo(url.host, url.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise EngineUnreachable(
                f"{self.url} cannot be reached from this host: {error}. Is the host name right?"
            ) from error

    def _outcome(self, path: str, request: Any) -> DistributedUpdateWeightsOutput:
        answer = self._answer("POST", path, request)
        try:
            return from_json(answer.content, DistributedUpdateWeightsOutput)
        except msgspec.MsgspecError:
            self._raise_unless_good(answer)
            raise EngineRefused(
                f"{self.url} returned an invalid response to an update: {_error_text(answer)}"
            ) from None

    def _decoded(self, answer: httpx.Response, kind: type[T]) -> T:
        try:
            return from_json(answer.content, kind)
        except msgspec.MsgspecError as error:
            raise Mismatch(
                f"{self.url}{answer.request.url.path} returned an invalid response ({error}): {_error_text(answer)}. "
                f"Is this the URL of an SGLang server, with sglang-reshard {__version__}?"
            ) from error

    def _ask(self, method: str, path: str, body: Any = None, keys: dict[str, str] | None = None) -> httpx.Response:
        answer = self._answer(method, path, body, keys)
        self._raise_unless_good(answer)
        return answer

    def _answer(self, method: str, path: str, body: Any = None, keys: dict[str, str] | None = None) -> httpx.Response:
        """`keys` are the headers that carry a key; by default those for control requests."""
        import httpx

        sent = {"Content-Type": "application/json", **(self._control if keys is None else keys)}
        try:
            content = b"" if body is None else msgspec.json.encode(body, enc_hook=as_list)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise Unsupported(f"{path}: an argument cannot be sent over HTTP: {error}") from error
        try:
            return self._client.request(method, self.url + path, content=content, headers=sent)
        except httpx.HTTPError as error:
            raise EngineUnreachable(
                f"{self.url} did not answer: {type(error).__name__}: {error}. Is the server up, and is this its URL?"
            ) from error

    def _raise_unless_good(self, answer: httpx.Response) -> None:
        status, path = answer.status_code, answer.request.url.path
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise Unauthorized(
                f"{self.url}{path} did not accept the key ({status}). Pass the keys that the server was started with: "
                f"its --api-key as api_key or {API_KEY}, its --admin-api-key as admin_api_key or {ADMIN_API_KEY}"
            )
        if status == HTTPStatus.NOT_FOUND:
            raise Unsupported(
                f"{self.url} has no {path} (404). Is sglang-reshard installed with SGLang there? Install {__version__} "
                "and restart the server. If it is installed, search the server's log for 'Failed to load plugin "
                "reshard', and for 'cannot update its weights', which names a mode that does not load plugins; and "
                "check that SGLANG_PLUGINS, if it is set there, contains 'reshard'"
            )
        if answer.is_success:
            return
        error = error_of(answer.content)
        if error is not None and error.type in _REFUSALS:
            raise _REFUSALS[error.type](error.message)
        # A proxy's answer in place of the server's: the request may have arrived, and be executed.
        kind = EngineUnreachable if error is None and status in _OF_PROXIES else EngineRefused
        raise kind(f"{self.url}{path} answered {status}: {_error_text(answer)}")


def client(timeout_s: float) -> httpx.Client:
    """Returns an HTTP client for an engine's server, which keeps no connection open."""
    import httpx

    return httpx.Client(**_options(timeout_s, httpx.HTTPTransport))


def async_client(timeout_s: float) -> httpx.AsyncClient:
    """Returns one like `client`."""
    import httpx

    return httpx.AsyncClient(**_options(timeout_s, httpx.AsyncHTTPTransport))


def _options(timeout_s: float, transport: Callable[..., Any]) -> dict[str, Any]:
    import httpx

    # A server may close an idle connection at the moment of its next use, so none is kept.
    limits = httpx.Limits(max_keepalive_connections=0)
    # The environment's proxies lead to the internet, an engine is in the private network. The transports do honor the
    # environment's certificates (SSL_CERT_FILE).
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
    return {"timeout": timeout, "trust_env": False, "transport": transport(limits=limits)}


def headers(api_key: str, admin_api_key: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the headers with a server's keys: for generation, and for control.

    A server with only one of the keys accepts that one for both.
    """
    return _bearer(api_key or admin_api_key), _bearer(admin_api_key or api_key)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""


class _ErrorResponse(msgspec.Struct):
    error: _Error


def error_of(content: bytes) -> _Error | None:
    """Returns the error in the format of SGLang and of this package; None for other responses."""
    try:
        return from_json(content, _ErrorResponse).error
    except msgspec.MsgspecError:
        return None


def _error_text(answer: httpx.Response) -> str:
    error = error_of(answer.content)
    return error.message if error else repr(answer.text[:_SHOWN_CHARACTERS])


def check_url(url: str) -> str:
    """Returns the URL of a server without a slash at its end. Raises Unsupported for any other text."""
    import httpx

    if not url:
        raise Unsupported(f"no server was given; pass url=, http://host:port, or set {URL}")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise Unsupported(f"{url!r} is not a valid URL: {error}; pass http://host:port") from error
    is_server = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) <= _MAX_PORT
    if not is_server or any(c in url for c in "?#"):  # they would take in the path that is appended
        raise Unsupported(f"{url!r} is not the URL of a server; pass http://host:port")
    return url.rstrip("/")
