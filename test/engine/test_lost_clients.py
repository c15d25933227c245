"""What a server makes of updates whose client disconnects, and of schedulers that answer too late."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest

from sglang_reshard.control import Address
from sglang_reshard.observability.report import RankReport
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.testing import cpu_host

pytestmark = pytest.mark.engine
REQUEST = DistributedUpdateWeightsReq(
    address=Address("s", "127.0.0.1", 1, "5ec2e7"),
    update=7,
    layout="1a70",
    handles=(),
    trainer_hosts=(),
    weight_version="43",
)
SUCCESS = DistributedUpdateWeightsOutput(success=True, message="", ranks=(RankReport(0, 1, 1, 0, {}),))
REVOKED = DistributedUpdateWeightsOutput(success=False, message="the trainer has given up update 7")
TORN = msgspec.structs.replace(REVOKED, torn=True)


@asynccontextmanager
async def unlocked():
    yield


@pytest.fixture(scope="module")
def patches():
    cpu_host.activate(tp_size=1)
    from sglang_reshard.patches import tokenizer_manager, torn_weights, weights_info

    return SimpleNamespace(tokenizer_manager=tokenizer_manager, torn_weights=torn_weights, weights_info=weights_info)


class Manager(SimpleNamespace):
    """SGLang's tokenizer manager, as far as an update looks at it. Its schedulers answer when `answered` is set."""

    def __init__(self, patches, monkeypatch):
        arguments = SimpleNamespace(weight_version="42", nnodes=1, dp_size=1)
        super().__init__(enable_metrics=False, is_pause=False, server_args=arguments, version="42")
        self.is_pause_cond = unlocked()
        self.model_update_lock = SimpleNamespace(writer_lock=unlocked())
        self.answered, self.output = asyncio.Event(), None

        async def no_patches_missing(*_):
            return ""

        monkeypatch.setattr(patches.tokenizer_manager, "_refusal", lambda *_: "")
        monkeypatch.setattr(patches.tokenizer_manager, "_missing_patches", no_patches_missing)

    def auto_create_handle_loop(self):
        pass

    async def update_weights_distributed_communicator(self, _envelope):
        await self.answered.wait()
        return [SimpleNamespace(open=lambda: self.output)]

    def _update_weight_version_if_provided(self, version):
        self.version = version


def answer(manager, output):
    manager.output = output
    manager.answered.set()


@pytest.mark.parametrize(
    ("output", "version", "torn"), [(SUCCESS, "43", ""), (REVOKED, "42", ""), (TORN, "42", "given up")]
)
def test_an_update_whose_client_disconnects_goes_on_to_its_outcome(patches, monkeypatch, output, version, torn):
    async def update():
        manager = Manager(patches, monkeypatch)
        request = asyncio.ensure_future(patches.tokenizer_manager.update_weights_distributed(manager, REQUEST))
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.sleep(0.05)
        assert request.cancelled()
        assert (
            getattr(manager, patches.weights_info.RUNNING)
            == "update 7 of session s is running; repeat this one when it has ended"
        )
        answer(manager, output)
        await asyncio.sleep(0.05)
        assert getattr(manager, patches.weights_info.RUNNING) == ""
        return manager

    manager = asyncio.run(update())
    assert manager.version == version
    assert torn in patches.torn_weights.reason(manager)
    assert bool(patches.torn_weights.reason(manager)) == bool(torn)


@pytest.mark.parametrize(
    ("output", "version", "torn"), [(SUCCESS, "43", False), (REVOKED, "42", False), (TORN, "42", True)]
)
def test_weights_count_as_torn_until_stopped_schedulers_have_answered(patches, monkeypatch, output, version, torn):
    async def update():
        manager = Manager(patches, monkeypatch)
        request = msgspec.structs.replace(REQUEST, timeout_s=0.01)
        outcome = await patches.tokenizer_manager.update_weights_distributed(manager, request)
        assert (outcome.success, outcome.torn) == (False, True)
        assert "did not answer" in patches.torn_weights.reason(manager)
        answer(manager, output)
        await asyncio.sleep(0.05)
        return manager

    manager = asyncio.run(update())
    assert manager.version == version
    assert bool(patches.torn_weights.reason(manager)) == torn
