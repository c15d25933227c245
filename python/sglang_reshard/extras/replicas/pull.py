"""Takes the live weights of another engine's server: asks it to share them, and serves the request that follows.

A client that requests a pull learns only whether the server at the URL shares: an answer of it is logged here, and
never passed on. All of it ends when it is cancelled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from http import HTTPStatus

import httpx
import msgspec

from sglang_reshard import tasks
from sglang_reshard.errors import (
    Aborted,
    ConnectionLost,
    DeadlineExceeded,
    EngineRefused,
    EngineUnreachable,
    Mismatch,
    ReshardError,
    TornWeights,
    Unauthorized,
    Unsupported,
)
from sglang_reshard.extras.request_mail import Mailbox
from sglang_reshard.layout.decoders import from_json
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
)
from sglang_reshard.protocol.server_client import async_client, error_of, headers
from sglang_reshard.protocol.validation import check_request
from sglang_reshard.version import PROTOCOL, __version__

Update = Callable[[DistributedUpdateWeightsReq, SharedWeights], Awaitable[DistributedUpdateWeightsOutput]]

logger = get_logger(__name__)
_MAX_ANSWER_BYTES = 64 * 1024
_SHOWN_CHARACTERS = 300  # of an answer, in the log
_REASONS = {  # why a server refuses, by the kind of its error
    TornWeights.__name__: "its weights are torn",
    Mismatch.__name__: "it has another protocol of sglang-reshard",
    EngineRefused.__name__: "an update of it is running, or no update of sglang-reshard has brought its weights",
}
_MAX_PORT = 65535
# Names, addresses and networks that this server takes weights from, beside its own host: "gpu7, *.train.example.com,
# 10.2.0.0/16", or "*" for all. Otherwise any client that may request a pull could choose the hosts that a server
# connects to. A name is compared as the URL has it, and never resolved.
PEERS = "SGLANG_RESHARD_PEERS"


async def pull(request: PullWeightsReq, update: Update) -> DistributedUpdateWeightsOutput:
    """Returns the outcome of `update`, which is called with the request that the other server's engine ranks make.

    Raises EngineUnreachable, Unauthorized, Unsupported, Mismatch, EngineRefused if the other server does not share, and
    DeadlineExceeded if it does not go on after `request.timeout_s`.
    """
    shared = await _shared(request)
    try:
        name = f"{socket.gethostname()}-{os.getpid()}"
        # Its end also ends a thread that waits for a request.
        async with tasks.entered(lambda: closing(Mailbox(shared.address, name, request.timeout_s))) as mailbox:
            asked = await asyncio.to_thread(mailbox.request, request.timeout_s)
            if asked is None:
                raise DeadlineExceeded(
                    f"{request.url} announced its weights, but did not offer them within {request.timeout_s:.0f} s; "
                    "look at that server's log"
                )
            check_request(asked)
            output = await update(asked, shared)
            with suppress(ReshardError):  # the outcome holds, even if the other server has ended since
                await asyncio.to_thread(mailbox.answer, output)
            return output
    except (Aborted, ConnectionLost) as error:
        raise EngineRefused(f"{request.url} did not share its weights: {error}") from error


async def _shared(request: PullWeightsReq) -> SharedWeights:
    """Asks the other server to share its weights."""
    wanted = ShareWeightsReq(
        package_version=__version__,
        protocol=PROTOCOL,
        transport=request.transport,
        bucket_bytes=request.bucket_bytes,
        timeout_s=request.timeout_s,
        verify=request.verify,
    )
    try:
        status, answer = await asyncio.wait_for(_answer(request, msgspec.json.encode(wanted)), request.timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineUnreachable(
            f"{request.url} did not answer: {type(error).__name__}. Is the server up, and is this its URL?"
        ) from error
    except (asyncio.TimeoutError, TimeoutError):
        raise EngineUnreachable(f"{request.url} did not answer within {request.timeout_s:g} s") from None
    if status == HTTPStatus.OK:
        try:
            return from_json(answer, SharedWeights)
        except msgspec.MsgspecError:
            pass
    logger.warning("%s answered %d to a pull: %r", request.url, status, answer[:_SHOWN_CHARACTERS])
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise Unauthorized(
            f"{request.url} did not accept the key; pass that server's keys as api_key and admin_api_key"
        )
    if status == HTTPStatus.NOT_FOUND:
        raise Unsupported(
            f"{request.url} has no /share_weights; install sglang-reshard with SGLang there and restart that server"
        )
    told = error_of(answer)
    reason = _REASONS.get(told.type if told else "", "it is not a server with sglang-reshard, or it failed")
    raise EngineRefused(f"{request.url} did not share its weights: {reason}. This server's log has its answer")


async def _answer(request: PullWeightsReq, content: bytes) -> tuple[int, bytes]:
    """Returns status and body; at most `_MAX_ANSWER_BYTES` of the body are read."""
    _, control = headers(request.api_key, request.admin_api_key)
    control = {"Content-Type": "application/json", **control}
    body = b""
    async with async_client(request.timeout_s) as client:
        url = request.url.rstrip("/") + "/share_weights"
        async with client.stream("POST", url, content=content, headers=control) as answer:
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    break
            return answer.status_code, body[:_MAX_ANSWER_BYTES]


def refusal(url: str) -> str:
    """Returns why this server takes no weights from the one at `url`; empty if it does."""
    try:
        parsed = httpx.URL(url)
        host, scheme, port = parsed.host.lower(), parsed.scheme, parsed.port or 1
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return f"{_shown(url)} is not a valid URL; pass http://host:port"
    # A path is appended to the URL: a query or a fragment would take it in, and what is before them be asked for.
    if scheme not in ("http", "https") or not host or port > _MAX_PORT or any(c in url for c in "?#@"):
        return f"{_shown(url)} is not the URL of a server; pass http://host:port"
    if is_peer(host, os.environ.get(PEERS, "")):
        return ""
    return (
        f"this server takes no weights from {_shown(host)}: it is another host, and {PEERS} in this server's "
        f"environment does not list it. Add it to {PEERS} and restart this server"
    )


def is_peer(host: str, listed: str) -> bool:
    """Returns whether `host`, a name in lower case or an address, is this host or among `listed`."""
    entries = listed.replace(",", " ").lower().split()
    if "*" in entries:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        own = ("localhost", socket.gethostname().lower())
        return host in own or any(host == e or (e.startswith("*.") and host.endswith(e[1:])) for e in entries)
    address = getattr(address, "ipv4_mapped", None) or address
    return _is_own(address) or any(_contains(entry, address) for entry in entries)


def _contains(entry: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # a name
        return False


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))  # only an address of this host can be bound
    except OSError:
        return False
    return True


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
