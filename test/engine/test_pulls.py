"""A pull ends when its client disconnects, unless the schedulers write: then they decide what the weights are."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import msgspec
import pytest

from sglang_reshard.control import ControlServer
from sglang_reshard.extras.request_mail import MailRoom
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput as Output
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, PullWeightsReq, SharedWeights
from support.scenarios import until

pytestmark = pytest.mark.engine


def pull(engine, url):
    """One HTTP request for a pull, whose client may disconnect."""
    from support.asgi_engine import Connection

    return Connection(engine.app, "/pull_weights", {"url": url, "timeout_s": 30})


@contextlib.asynccontextmanager
async def sharing():
    """The HTTP side of a server that shares: `requests` counts, `ended` those whose client has gone."""
    control = ControlServer.open()
    seen = SimpleNamespace(control=control, requests=0, ended=0, answers=asyncio.Event(), url="")

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        seen.requests += 1
        gone = asyncio.ensure_future(_end(reader))
        await asyncio.wait([gone, asyncio.ensure_future(seen.answers.wait())], return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            seen.ended += 1
        else:
            body = msgspec.json.encode(SharedWeights(control.address, "7", "0" * 16, "float32"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            await gone
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with server:
            yield seen
    finally:
        await asyncio.to_thread(control.close)


async def _end(reader):
    while await reader.read(1024):
        pass


async def test_a_host_that_is_not_listed_is_not_asked(engine_class, monkeypatch):
    monkeypatch.delenv("SGLANG_RESHARD_PEERS", raising=False)
    monkeypatch.setattr("sglang_reshard.patches.weights_sharing.pull_from", lambda *_: 1 / 0)
    async with (engine := engine_class()).client() as client:
        answer = await client.post("/pull_weights", json={"url": "http://192.0.2.1:80"})
    assert answer.status_code == 400
    assert "SGLANG_RESHARD_PEERS in this server's environment does not list it" in answer.json()["message"]
    assert engine.under_way == ""


async def test_of_two_pulls_at_once_one_is_refused(engine_class, monkeypatch):
    from sglang_reshard.patches import weights_sharing

    async def pull_from(*_):
        await asyncio.sleep(0.01)
        return Output(success=True, message="")

    monkeypatch.setattr(weights_sharing, "pull_from", pull_from)
    engine, request = engine_class(), PullWeightsReq(url="http://127.0.0.1:9")
    first, second = await asyncio.gather(*(weights_sharing.pull(engine, request) for _ in range(2)))
    assert (first.success, second.success, engine.under_way) == (True, False, "")
    assert "are being pulled; repeat this" in second.message


async def test_a_pull_that_waits_for_the_other_server_ends_with_its_client(engine_class):
    engine = engine_class()
    async with sharing() as other:
        connection = pull(engine, other.url)
        await until(lambda: other.requests)
        assert "are being pulled" in engine.under_way
        connection.disconnect()
        await connection.task
        await until(lambda: other.ended)
    await until(lambda: not engine.under_way)  # the client is told before the pull has left
    assert (engine.torn, engine.asked) == ("", [])


async def test_a_pull_that_waits_for_the_request_ends_with_its_client_and_leaves(engine_class):
    engine = engine_class()
    async with sharing() as other:
        other.answers.set()
        room = await asyncio.to_thread(MailRoom, other.control.address, 30)
        connection = pull(engine, other.url)
        await asyncio.to_thread(room.wait, 1, 30)
        assert len(room.receivers()) == 1
        connection.disconnect()
        await connection.task
        await until(lambda: not room.receivers())
        await asyncio.to_thread(room.close)
    await until(lambda: not engine.under_way)
    assert (engine.torn, engine.asked) == ("", [])


@pytest.mark.parametrize(
    ("digest", "torn"), [("0" * 16, ""), ("1" * 16, "the weights of {url} are no longer those of its last update")]
)
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_a_pull_whose_schedulers_write_goes_on_and_is_compared(engine_class, digest, torn, leaves):
    engine = engine_class(lambda _: Output(success=True, message="", digest=digest))
    engine.answers.clear()
    async with sharing() as other:
        other.answers.set()
        room = await asyncio.to_thread(MailRoom, other.control.address, 30)
        connection = pull(engine, other.url)
        await asyncio.to_thread(room.wait, 1, 30)
        request = DistributedUpdateWeightsReq(
            address=other.control.address.named("weights"),
            update=1,
            layout="l",
            handles=("h",),
            trainer_hosts=("x",),
            weight_version="7",
            timeout_s=30,
        )
        (name,) = room.receivers()
        sent = asyncio.ensure_future(asyncio.to_thread(room.send, name, request))
        await until(lambda: engine.asked)
        if leaves:
            connection.disconnect()
            await connection.task
            assert engine.under_way, "the schedulers write"
        engine.answers.set()
        outcome = await sent  # the other server is told, too
        await connection.task
        await until(lambda: not engine.under_way)
        await asyncio.to_thread(room.close)
    assert outcome.success is not bool(torn)
    assert engine.torn.startswith(torn.format(url=other.url)) if torn else engine.torn == ""
    assert engine.versions == ([] if torn else ["7"])
    if not leaves:
        assert json.loads(connection.body)["torn"] is bool(torn)
