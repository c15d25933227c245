"""A server that is asked to pull tells nothing of what it finds at the URL, and waits no longer than it is asked to."""

import asyncio
import contextlib
import time

import msgspec
import pytest

from sglang_reshard.control import Address, ControlServer
from sglang_reshard.errors import (
    DeadlineExceeded,
    EngineRefused,
    EngineUnreachable,
    ReshardError,
    Unauthorized,
    Unsupported,
)
from sglang_reshard.extras.replicas.pull import pull
from sglang_reshard.extras.request_mail import MailRoom
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    PullWeightsReq,
    SharedWeights,
)
from support.scenarios import run

SECRET = "the internal page"
OK = "HTTP/1.1 200 OK\r\n"


async def pulled(serve, timeout_s=10.0):
    """Returns what a pull raises from a server that calls `serve(writer)` for each request that has arrived."""

    handlers = []

    async def handle(reader, writer):
        handlers.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /share_weights HTTP")
        try:
            await serve(writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def update(*_):
        raise AssertionError("nothing was shared")

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        request = PullWeightsReq(url=f"http://127.0.0.1:{port}", admin_api_key="k", timeout_s=timeout_s)
        with pytest.raises(Exception) as raised:  # noqa: PT011 it is the tests that say which
            await pull(request, update)
        for handler in handlers:  # from Python 3.12 on the server's end waits for them
            handler.cancel()
    return raised.value


def answering(status, body, head=""):
    async def serve(writer):
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{head}\r\n{body}".encode())

    return serve


def error(kind):
    return msgspec.json.encode({"error": {"message": SECRET, "type": kind}}).decode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (200, SECRET, EngineRefused, "it is not a server with sglang-reshard, or it failed"),
        (200, f'{{"address": "{SECRET}"}}', EngineRefused, "it is not a server with sglang-reshard, or it failed"),
        (500, SECRET, EngineRefused, "it is not a server with sglang-reshard, or it failed"),
        (400, error("EngineRefused"), EngineRefused, "an update of it is running, or no update"),
        (400, error("Mismatch"), EngineRefused, "it has another protocol"),
        (503, error("TornWeights"), EngineRefused, "its weights are torn"),
        (400, error(SECRET), EngineRefused, "it is not a server with sglang-reshard, or it failed"),
        (401, SECRET, Unauthorized, "did not accept the key"),
        (404, SECRET, Unsupported, "has no /share_weights"),
        (302, SECRET, EngineRefused, "it is not a server with sglang-reshard"),
    ],
)
def test_nothing_of_an_answer_is_passed_on(told, status, body, kind, says):
    found = run(pulled(answering(status, body, "Location: http://127.0.0.1:1/\r\n")))
    assert type(found) is kind
    assert says in str(found)
    assert SECRET not in str(found)
    assert SECRET in told.text, "the operator finds it in the log"


async def never(_writer):
    await asyncio.sleep(60)


async def trickle(writer):
    writer.write(f"{OK}\r\n".encode())
    while True:  # always within the timeout of one read
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def flood(writer):
    writer.write(f"{OK}\r\n".encode())
    while True:
        writer.write(b"x" * 2**16)
        await writer.drain()


@pytest.mark.parametrize(
    ("serve", "kind"), [(never, EngineUnreachable), (trickle, EngineUnreachable), (flood, EngineRefused)]
)
def test_an_answer_is_waited_for_no_longer_than_is_asked(serve, kind):
    started = time.monotonic()
    assert type(run(pulled(serve, timeout_s=0.5))) is kind
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b", "x" * 200, "256.0.0.1"])
def test_an_address_that_leads_nowhere_is_told(host):
    shared = SharedWeights(Address("s", host, 9, "0" * 64), "7", "", "float32")
    found = run(pulled(answering(200, msgspec.json.encode(shared).decode()), timeout_s=0.5))
    assert isinstance(found, DeadlineExceeded)


def test_an_outcome_that_the_other_server_never_hears_of_is_the_outcome(monkeypatch):
    """It ends when the weights have arrived: they are written, and served."""

    async def scenario():
        server = ControlServer.open()
        shared = SharedWeights(server.address, "7", "", "float32")

        async def share(_request):
            return shared

        async def update(_asked, _shared):
            await asyncio.to_thread(server.close)
            return DistributedUpdateWeightsOutput(success=True, message="written")

        def send():
            with contextlib.closing(MailRoom(server.address, 10)) as room:
                room.wait(1, 10)
                with contextlib.suppress(ReshardError):
                    room.send(room.receivers()[0], request)

        request = DistributedUpdateWeightsReq(
            address=server.address, update=1, layout="l", handles=("h",), trainer_hosts=("x",), timeout_s=10
        )
        monkeypatch.setattr("sglang_reshard.extras.replicas.pull._shared", share)
        sending = asyncio.ensure_future(asyncio.to_thread(send))
        output = await pull(PullWeightsReq(url="http://127.0.0.1:9", timeout_s=10), update)
        await sending
        return output

    assert run(scenario()).message == "written"
