"""While an engine looks for the trainer of an update, it serves requests, and its schedulers are asked nothing."""

import asyncio
import secrets
import socket

import pytest

from sglang_reshard.control import Address, ControlServer
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq

pytestmark = pytest.mark.engine
TIMEOUT_S = 1.0


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
async def test_the_engine_serves_on(engine_class, kind, paused, options, request):
    asked = DistributedUpdateWeightsReq(
        address=request.getfixturevalue(kind), update=1, layout="l", handles=("h",), trainer_hosts=("x",),
        timeout_s=TIMEOUT_S, **options,
    )  # fmt: skip
    engine = engine_class()
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
    output = await update
    assert not output.success
    assert not output.torn
    assert ("did not answer within 1 s" if kind == "silent" else "the trainer is not in update 1") in output.message
    assert engine.asked == aborted == []
    assert requests > 10 or kind == "of_others"
    assert not engine.under_way
