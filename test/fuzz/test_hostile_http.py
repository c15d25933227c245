"""Whatever a client sends to a server's endpoints: it is refused, and the server is as it was, its weights included.

Bodies are those of real requests, changed or damaged; headers are changed, too. The routes, the validation and SGLang's
check of keys are the real ones; schedulers answer that they refuse.
"""

import asyncio
import json
import logging

import msgspec
import pytest

from fuzz.arbitrary import changed, damaged
from fuzz.settings import EXAMPLES, SWEEP, fuzzed_with
from sglang_reshard.control import Address
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.observability.report import RankReport
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    LoraAdapter,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
    encode,
)
from sglang_reshard.routes.delta.offer import DeltaOffer
from sglang_reshard.routes.relay.offers import Relay
from sglang_reshard.testing import cpu_host
from sglang_reshard.version import PROTOCOL, __version__

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # thousands of cases under make test-all
fuzzed = fuzzed_with(max(EXAMPLES, 5000) if SWEEP else EXAMPLES)  # 20,000 requests of all kinds under make test-all

ADDRESS = Address("s", "127.0.0.1", 9, "0" * 64)
UPDATE = DistributedUpdateWeightsReq(
    address=ADDRESS,
    update=1,
    layout="l",
    handles=("h", "h"),
    trainer_hosts=("x", "x"),
    trainer_devices=(RankGpuInfo("u", ("u",), "native", {"version": "2.28"}),) * 2,
    prepared="t",
    weight_version="7",
    timeout_s=5.0,
    ignore=("*.bias",),
    apart={"lm_head.weight": "it differs"},
    offers=({0: encode(DeltaOffer(1, 2, kind="DRAM", address=4096))}, {}),
    package_version=__version__,
    protocol=PROTOCOL,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
UPDATES = (
    UPDATE,
    msgspec.structs.replace(UPDATE, staged=True, verify="full"),
    msgspec.structs.replace(UPDATE, lora=(LoraAdapter("policy", '{"r": 8}'),)),
    msgspec.structs.replace(UPDATE, transport="nixl", around={"relay": encode(Relay("relay/1", ("a", "b"), 0, 1))}),
)
SHARE = ShareWeightsReq(package_version=__version__, protocol=PROTOCOL, timeout_s=5.0)
SHARED = SharedWeights(ADDRESS, "7", "0" * 16, "float32")
PROBE = ProbeSummary("passed", 0.1, 0.2, 1.0)
URLS = (
    "",
    "ftp://x",
    "http://",
    "http://[::1",
    "http://127.0.0.1:99999",
    "http://a b",
    "http://x\n",
    "//x",
    "http://127.0.0.1:0",
    "http://192.0.2.1",
    "http://a@b",
    "http://127.0.0.1/?",
    "http://\0",
    "http://xn--\ufffd",
)
VALUES = (
    *(None, True, "", "\0", "x" * 5000, "NaN", "127.0.0.1", [], {}, [[]], [None], {"a": 1}),
    *(-1, 0, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**30, 1e308, 1e-320, -0.0),
)
HEADERS = (
    {},
    {"content-type": "text/plain"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-encoding": "gzip"},
    {"content-length": "18446744073709551616"},
    {"traceparent": "x" * 5000},
    {"authorization": "Bearer"},
    {"authorization": "Basic eDp5"},
    {"authorization": "Bearer " + "x" * 5000},
    {"x-forwarded-for": "127.0.0.1", "host": "evil:1"},
)


class Tracebacks(logging.Handler):
    """Keeps what was logged with a traceback, by anybody."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if record.exc_info:
            self.found.append(record.getMessage())


@pytest.fixture(scope="module")
def loop():
    cpu_host.activate(tp_size=1)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: logging.getLogger().error("%s", context, exc_info=True))
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(scope="module")
def ask(loop):
    """Sends a request, and returns the answer after it was made sure that the server is as it was."""
    from support.asgi_engine import Engine

    log = Tracebacks()
    logging.getLogger().addHandler(log)
    logging.getLogger("sglang_reshard").addHandler(log)
    engine = loop.run_until_complete(_made(Engine))
    client = engine.client()

    def asked(path, body, headers):
        async def send():
            return await asyncio.wait_for(client.post(path, content=body, headers=headers), 30)

        answer = loop.run_until_complete(send())
        assert answer.status_code in (200, 400, 401), answer.text
        assert len(answer.content) < 5000
        assert (engine.torn, engine.under_way, engine.versions, log.found) == ("", "", [], [])
        return answer

    asked.engine = engine
    yield asked
    loop.run_until_complete(client.aclose())
    logging.getLogger().removeHandler(log)
    logging.getLogger("sglang_reshard").removeHandler(log)


async def _made(kind):
    """An engine that an update has brought its weights, so that it could share them."""
    from sglang_reshard.patches import weights_info

    engine = kind()
    brought = DistributedUpdateWeightsOutput(success=True, message="", ranks=(RankReport(0, 1, 1, 0, {}),))
    weights_info.record(engine, UPDATE, brought)
    return engine


def hostile(request, random):
    """The body of a request with something wrong in it, most of the time."""
    body = json.loads(msgspec.json.encode(request))
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        body = _put(body, random) if random.random() < 0.5 else changed(body, random)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    kind = random.random()
    if kind < 0.15:
        return damaged(data, random)
    if kind < 0.2:
        return b'{"z":' + random.choice((b"[", b'{"a":')) * random.choice((10, 900, 1100, 5000))
    if kind < 0.22:
        return b'{"update":' + b"9" * random.choice((20, 400, 5000)) + b"}"
    return data if kind < 0.98 else random.randbytes(random.randrange(200))


def _put(value, random):
    """Puts an odd value somewhere."""
    if isinstance(value, (dict, list)) and value and random.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = random.choice(keys)
        copy = value.copy()
        copy[key] = _put(value[key], random)
        return copy
    return random.choice(VALUES)


@fuzzed
def test_updates(ask, random):
    ask("/update_weights_distributed", hostile(random.choice(UPDATES), random), random.choice(HEADERS))


@fuzzed
def test_shares(ask, random):
    ask("/share_weights", hostile(SHARE, random), random.choice(HEADERS))


@fuzzed
def test_probes(ask, random):
    ask("/record_probe", hostile(PROBE, random), random.choice(HEADERS))


@pytest.fixture(scope="module")
def peer(loop):
    """A server whose answers to /share_weights are what a test makes them."""

    async def handle(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(peer.answer)
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield peer
    server.close()
    loop.run_until_complete(server.wait_closed())


@fuzzed
def test_pulls(ask, peer, random):
    url = random.choice(URLS) if random.random() < 0.3 else peer.url
    body = hostile(SHARED, random)
    status = random.choice((200, 200, 200, 200, 204, 302, 400, 401, 404, 500, 503))
    head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    peer.answer = damaged(head, random) + body if random.random() < 0.1 else head + body
    request = PullWeightsReq(url=url, api_key="a", admin_api_key="b", timeout_s=0.05)
    asked = hostile(request, random) if random.random() < 0.5 else msgspec.json.encode(request)
    ask("/pull_weights", asked, random.choice(HEADERS))


@pytest.mark.parametrize(
    ("path", "request_", "says"),
    [("/update_weights_distributed", UPDATE, "it was asked"), ("/share_weights", SHARE, "not shared")],
)
def test_a_request_without_anything_wrong_reaches_the_schedulers(ask, path, request_, says):
    """Else the tests above would look at the first check only."""
    before = len(ask.engine.asked)
    assert says in ask(path, msgspec.json.encode(request_), {}).text
    assert len(ask.engine.asked) == before + 1
