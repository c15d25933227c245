"""When a server's weights are not shared with another engine, and who waits while they are."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from sglang_reshard import __version__
from sglang_reshard.control import Address, ControlClient
from sglang_reshard.errors import EngineRefused, ReshardError
from sglang_reshard.observability.report import RankReport
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
)
from sglang_reshard.testing import cpu_host

pytestmark = pytest.mark.engine
REQUEST = DistributedUpdateWeightsReq(
    address=Address("s", "127.0.0.1", 1, "5ec2e7"), update=7, layout="1a70", handles=(), trainer_hosts=()
)


@pytest.fixture(scope="module")
def patches():
    cpu_host.activate(tp_size=1)  # else SGLang, which these import, is no CPU's for the tests that follow
    from sglang_reshard.patches import tokenizer_manager, torn_weights, weights_info, weights_sharing

    return SimpleNamespace(
        tokenizer_manager=tokenizer_manager,
        torn_weights=torn_weights,
        weights_info=weights_info,
        weights_sharing=weights_sharing,
    )


@pytest.fixture
def manager(patches):
    """SGLang's tokenizer manager, as far as it is looked at, after an update."""
    arguments = SimpleNamespace(weight_version="42", nnodes=1, dp_size=1)
    it = SimpleNamespace(enable_metrics=False, is_pause=False, server_args=arguments)
    ranks = (RankReport(0, 1, 1, 0, {}),)
    patches.weights_info.record(it, REQUEST, DistributedUpdateWeightsOutput(success=True, message="", ranks=ranks))
    return it


def test_an_update_is_refused_while_another_engine_does_not_stop_reading(patches, manager, monkeypatch):
    monkeypatch.setattr(patches.tokenizer_manager, "_refusal", lambda *_: "")

    async def no_patches_missing(*_):
        return ""

    monkeypatch.setattr(patches.tokenizer_manager, "_missing_patches", no_patches_missing)

    async def update():
        reading = asyncio.create_task(asyncio.sleep(60))
        patches.weights_info.add_share(manager, reading)
        output = await patches.tokenizer_manager.run_update(manager, msgspec.structs.replace(REQUEST, timeout_s=0.01))
        reading.cancel()
        return output

    output = asyncio.run(update())
    assert not output.success
    assert "another engine has been reading the live weights" in output.message


def test_weights_that_are_being_written_or_unknown_are_not_shared(patches, manager):
    manager.auto_create_handle_loop = lambda: None
    request = ShareWeightsReq(package_version=__version__)

    def refusal():
        with pytest.raises(ReshardError) as refused:
            asyncio.run(patches.weights_sharing.share(manager, request, "127.0.0.1"))
        return f"{type(refused.value).__name__}: {refused.value}"

    with patches.weights_info.running(manager, "update 8 is running"):
        assert refusal() == "EngineRefused: update 8 is running"
    patches.torn_weights.mark(manager, "half of update 8")
    assert refusal() == "TornWeights: half of update 8"
    patches.torn_weights.heal(manager)
    patches.weights_info.clear(manager)
    assert "not brought by an update" in refusal()


def test_schedulers_that_fail_to_share_leave_nothing_behind(patches, manager, monkeypatch):
    manager.auto_create_handle_loop = lambda: None
    manager.model_config = SimpleNamespace(dtype="torch.bfloat16")
    manager.server_args.nnodes = 1
    servers = []
    open_server = patches.weights_sharing.ControlServer.open
    monkeypatch.setattr(
        patches.weights_sharing.ControlServer,
        "open",
        lambda interface: servers.append(open_server(interface)) or servers[-1],
    )

    async def share(outcome):
        async def ask(*_):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(patches.weights_sharing, "ask_schedulers", ask)
        try:
            with pytest.raises((EngineRefused, RuntimeError)) as refused:
                await patches.weights_sharing.share(manager, ShareWeightsReq(package_version=__version__), "127.0.0.1")
        finally:
            assert await patches.weights_info.unshared(manager, timeout_s=10)
        return str(refused.value)

    assert asyncio.run(share(DistributedUpdateWeightsOutput(success=False, message="in place"))) == "in place"
    assert asyncio.run(share(RuntimeError("a bug"))) == "a bug"
    for server in servers:
        with pytest.raises(ReshardError):
            ControlClient(server.address, 0.5)
