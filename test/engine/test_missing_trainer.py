"""While an engine looks for the trainer of an update, it serves requests, and its schedulers are asked nothing."""

import asyncio
import secrets
import socket
from types import SimpleNamespace

import pytest

from sglang_reshard.control import Address, ControlServer
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.testing import cpu_host

pytestmark = pytest.mark.engine
TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def engines():
    cpu_host.activate(tp_size=1)  # else SGLang, which these import, is no CPU's for the tests that follow
    from support import asgi_engine

    return asgi_engine


@pytest.fixture
def silent():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Address("s", "127.0.0.1", listener.getsockname()[1], secrets.token_hex(32))


@pytest.fixture
def of_others():
    server = ControlServer.open()
    yield server.address
    server.close()


@pytest.mark.parametrize("kind", ["silent", "of_others"])
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("options", [{}, {"staged": True}, {"abort_all_requests": True}], ids=str)
def test_the_engine_serves_on(engines, kind, paused, options, request):
    asked = DistributedUpdateWeightsReq(
        address=request.getfixturevalue(kind), update=1, layout="l", handles=("h",), trainer_hosts=("x",),
        timeout_s=TIMEOUT_S, **options,
    )  # fmt: skip
    expected = "did not answer within 1 s" if kind == "silent" else "the trainer is not in update 1"

    async def scenario():
        engine = engines.Engine()
        engine.is_pause = paused
        del engine._reshard_trainerpresence
        aborted = []
        engine.abort_request = lambda **options: aborted.append(options)
        update = asyncio.ensure_future(engine.update_weights_distributed(asked))
        requests = 0

        async def serve():
            async with engine.model_update_lock.reader_lock, engine.is_pause_cond:
                pass

        while not update.done():
            await asyncio.wait_for(serve(), TIMEOUT_S / 2)
            requests += 1
            await asyncio.sleep(0.01)
        return SimpleNamespace(output=await update, engine=engine, requests=requests, aborted=aborted)

    seen = asyncio.run(scenario())
    assert not seen.output.success
    assert not seen.output.torn
    assert expected in seen.output.message
    assert seen.engine.asked == seen.aborted == []
    assert seen.requests > 10 or kind == "of_others"
    assert not seen.engine.under_way
