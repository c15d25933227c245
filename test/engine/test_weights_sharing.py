"""When a server's weights are not shared with another engine, and who waits while they are."""

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sglang_reshard import WeightSender
from sglang_reshard.control import Address, ControlClient
from sglang_reshard.errors import EngineRefused, ReshardError
from sglang_reshard.extras.replicas.share import LiveWeights
from sglang_reshard.extras.request_mail import Mailbox
from sglang_reshard.observability.report import RankReport
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    ShareWeightsReq,
)
from sglang_reshard.protocol.session import Session
from sglang_reshard.testing import cpu_host
from sglang_reshard.version import PROTOCOL, __version__
from support.scenarios import run, until
from support.threads import have_ended
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of

pytestmark = pytest.mark.engine
REQUEST = DistributedUpdateWeightsReq(
    address=Address("s", "127.0.0.1", 1, "5ec2e7"), update=7, layout="1a70", handles=(), trainer_hosts=()
)


@pytest.fixture(scope="module")
def patches():
    cpu_host.activate(tp_size=1)  # else SGLang, which these import, is no CPU's for the tests that follow
    from sglang_reshard import patches
    from sglang_reshard.patches import sound_weights, weights_info, weights_sharing  # noqa: F401

    return patches


@pytest.fixture
def manager(patches):
    """SGLang's tokenizer manager, as far as it is looked at, after an update."""
    arguments = SimpleNamespace(weight_version="42", nnodes=1, dp_size=1, enable_lora=False)
    it = SimpleNamespace(enable_metrics=False, is_pause=False, server_args=arguments)
    ranks = (RankReport(0, 1, 1, 0, {}),)
    patches.weights_info.record(it, REQUEST, DistributedUpdateWeightsOutput(success=True, message="", ranks=ranks))
    return it


def test_weights_that_are_being_written_or_unknown_are_not_shared(patches, manager):
    manager.auto_create_handle_loop = lambda: None
    request = ShareWeightsReq(package_version=__version__, protocol=PROTOCOL)

    def refusal():
        with pytest.raises(ReshardError) as refused:
            asyncio.run(patches.weights_sharing.share(manager, request, "127.0.0.1"))
        return f"{type(refused.value).__name__}: {refused.value}"

    with patches.weights_info.running(manager, "update 8 is running"):
        assert refusal() == "EngineRefused: update 8 is running"
    patches.sound_weights.mark(manager, "half of update 8")
    assert refusal() == "TornWeights: half of update 8"
    patches.sound_weights.heal(manager)
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
                await patches.weights_sharing.share(
                    manager, ShareWeightsReq(package_version=__version__, protocol=PROTOCOL), "127.0.0.1"
                )
        finally:
            await asyncio.wait_for(patches.weights_info.unshared(manager), 10)
        return str(refused.value)

    assert asyncio.run(share(DistributedUpdateWeightsOutput(success=False, message="in place"))) == "in place"
    assert asyncio.run(share(RuntimeError("a bug"))) == "a bug"
    for server in servers:
        with pytest.raises(ReshardError):
            ControlClient(server.address, 0.5)


@pytest.mark.parametrize("takes_it", [False, True], ids=["never-joins", "takes-and-never-answers"])
def test_a_share_that_is_not_answered_holds_up_no_update(patches, manager, monkeypatch, takes_it):
    """The sharing rank's side runs as in a scheduler; the other engine stops after it has taken the request."""
    manager.auto_create_handle_loop = lambda: None
    manager.model_config = SimpleNamespace(dtype="torch.float32")
    source = ToyRank(0, 1, torch.float32)
    receiver = receiver_of(source)
    sender = WeightSender.within(Session.host(), trainer_rank=0, global_ranks=(0,), send=receiver.update, timeout_s=30)
    sender.update(checkpoint(1).items())
    live = LiveWeights(receiver, 0, 1, torch.device("cpu"))

    async def ask(_manager, request, _step):
        return live.start(request)

    monkeypatch.setattr(patches.weights_sharing, "ask_schedulers", ask)

    async def scenario():
        request = ShareWeightsReq(package_version=__version__, protocol=PROTOCOL, timeout_s=3600, verify="off")
        shared = await patches.weights_sharing.share(manager, request, "127.0.0.1")
        mailbox = None
        if takes_it:
            mailbox = await asyncio.to_thread(Mailbox, shared.address, "puller", 10)
            assert await asyncio.to_thread(mailbox.request, 10) is not None
        started = time.monotonic()
        await patches.weights_info.unshared(manager)
        assert time.monotonic() - started < 10
        assert not patches.weights_info.of(manager).shares
        if mailbox is not None:
            await until(lambda: mailbox.is_lost)  # its thread hears that there will be nothing
            await asyncio.to_thread(mailbox.close)

    try:
        run(scenario())
    finally:
        sender.close()
        receiver.close()
    assert have_ended("sglang-reshard share")


@pytest.mark.parametrize("interface", ["127.0.0.1", "::1"])
@pytest.mark.parametrize(("meet", "host"), [("10.1.2.3:5000", "10.1.2.3"), ("[2001:db8::1]:5000", "2001:db8::1")])
def test_nodes_meet_at_the_address_of_the_first_one(patches, manager, interface, meet, host):
    manager.server_args.dist_init_addr = meet
    assert patches.weights_sharing.engine_interface(manager, interface) == interface
    manager.server_args.nnodes = 2
    assert patches.weights_sharing.engine_interface(manager, interface) == host
    assert patches.weights_sharing.engine_interface(manager, "10.7.7.7") == "10.7.7.7"


@pytest.mark.parametrize("address", ["::1", "[::1]", "127.0.0.1"])
def test_a_trainers_group_is_joined_at_any_kind_of_address(patches, address):
    from sglang_reshard.patches import custom_group

    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind((address.strip("[]"), 0))
        port = free.getsockname()[1]
    group = custom_group.join(address, port, 0, 1, f"at {address}", "gloo", 20)
    dist.destroy_process_group(group)
