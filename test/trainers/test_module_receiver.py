"""Plain torch modules in other processes take a trainer's weights when they are ready for them, whole or not at all."""

import contextlib
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sglang_reshard import ModuleReceiver, ModuleSender
from sglang_reshard.control import ControlServer
from sglang_reshard.control.connection import FrameWriter
from sglang_reshard.errors import EngineRefused, Mismatch, TornWeights
from sglang_reshard.extras.request_mail import Mailbox, MailRoom
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, encode
from sglang_reshard.routes.relay.offers import Relay
from support.documents import ROOT, printed
from support.world import run_world

TRAINERS = 2


class Policy(nn.Module):
    """Nothing of it is made for receiving: a buffer, a tied head, a scalar."""

    def __init__(self, hidden=6):
        super().__init__()
        self.embed = nn.Embedding(9, hidden)
        self.body = nn.Sequential(nn.Linear(hidden, 5), nn.Tanh(), nn.Linear(5, hidden))
        self.head = nn.Linear(hidden, 9, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(hidden))

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens) - self.mean)) * self.scale


def numbered(model, version):
    """The weights of a version: the same wherever they are computed."""
    for number, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        if name != "head.weight":
            generator = torch.Generator().manual_seed(100 * version + number)
            yield name, torch.randn(tensor.shape, generator=generator)


def write(model, version):
    state = model.state_dict()
    for name, whole in numbered(Policy(), version):
        if isinstance(state[name], DTensor):
            row = state[name].to_local()
            row.copy_(whole.chunk(TRAINERS)[dist.get_rank()] if row.numel() else row)
        else:
            state[name].copy_(whole)


def expected(version, tokens):
    policy = Policy()
    with torch.no_grad():
        for name, whole in numbered(policy, version):
            policy.state_dict()[name].copy_(whole)
        return policy(tokens)


def metadata_of(sender):
    said = [sender.metadata if sender is not None else None]
    dist.broadcast_object_list(said, 0)
    return said[0]


def share(trainer, update, collect, *args):
    """Runs `update` on the trainer ranks, the first ones, and `collect` with a receiver on the others."""
    group = dist.new_group(list(range(TRAINERS)))
    if trainer.rank < TRAINERS:
        sender = ModuleSender(group, timeout_s=90)
        metadata_of(sender)
        model = Policy()
        fully_shard(model, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
        found = update(sender, model, *args)
        sender.close()
        return found
    policy = Policy().requires_grad_(False)
    return collect(ModuleReceiver(policy), policy, metadata_of(None), *args)


TOKENS = torch.arange(8).view(2, 4)


def update_thrice(sender, model):
    sender.wait_for_receivers(2, 30)
    reports = []
    for version in (1, 2, 3):
        write(model, version)
        of_all = sender.update(model, weight_version=str(version), verify="full").values()
        for report in of_all:
            (one,) = report.engine_ranks
            reports.append((one.received_bytes, one.least_bytes, "plan" in report.seconds))
    return reports


def collect_thrice(receiver, policy, metadata):
    """In its own way: one waits, one polls, one has a thread."""
    receiver.init(metadata)
    way = dist.get_rank() % 2
    if way == 0:
        seen = []
        for _ in range(3):
            version = receiver.receive(30)
            alike = torch.equal(policy(TOKENS), expected(int(version), TOKENS))
            seen.append((version, alike, policy.scale._version))  # a write to autograd
        receiver.close()
        return seen
    receiver.start()
    seen, mixed = set(), 0
    deadline = time.monotonic() + 30
    while "3" not in seen and time.monotonic() < deadline:
        with receiver.reading() as version:
            if version is not None:
                seen.add(version)
                mixed += not torch.equal(policy(TOKENS), expected(int(version), TOKENS))
        time.sleep(0.01)
    receiver.close()
    return sorted(seen)[-1], mixed


def test_two_collectors_take_what_the_trainer_has_each_in_its_own_way():
    told, _ = run_world(TRAINERS + 2, 0, share, None, update_thrice, collect_thrice)
    for reports in told[:TRAINERS]:
        assert len(reports) == 6
        assert all(received == least for received, least, _ in reports)
        assert [planned for *_, planned in reports] == [True, True, False, False, False, False]
    assert told[TRAINERS] == [("1", True, 1), ("2", True, 2), ("3", True, 3)]
    assert told[TRAINERS + 1] == ("3", 0)


# -- receivers that come, go, and are not ready


def update_those_who_are_there(sender, model):
    told = [sorted(sender.update(model, weight_version="0"))]  # nobody
    dist.barrier()
    sender.wait_for_receivers(1, 30)
    write(model, 1)
    told.append(len(sender.update(model, weight_version="1")))
    dist.barrier()  # the receiver leaves
    dist.barrier()
    told.append(len(sender.update(model, weight_version="2")))
    dist.barrier()  # another one comes, and has the wrong model
    sender.wait_for_receivers(2, 30)
    with pytest.raises(EngineRefused) as refused:
        sender.update(model, weight_version="3")
    told.append(str(refused.value))
    return told


def collect_and_leave(receiver, policy, metadata):
    with pytest.raises(Mismatch, match="call init first"):
        receiver.poll_and_apply()
    with pytest.raises(Mismatch, match="not the metadata of a ModuleSender"):
        receiver.init("{}")
    dist.barrier()
    receiver.init(metadata)
    with pytest.raises(Mismatch, match="init was already called"):
        receiver.init(metadata)
    first = receiver.receive(30), torch.equal(policy(TOKENS), expected(1, TOKENS))
    assert receiver.receive(0.05) is None
    assert receiver.poll_and_apply() is False
    dist.barrier()
    receiver.close()
    assert "sglang-reshard control client" not in {thread.name for thread in threading.enumerate()}
    dist.barrier()
    dist.barrier()
    wide = Policy(hidden=7).requires_grad_(False)
    other = ModuleReceiver(wide)
    other.init(metadata)
    before = wide.scale.clone()
    applied = other.poll_and_apply(30)
    other.close()
    return first, applied, torch.equal(before, wide.scale)


def test_receivers_come_and_go_and_a_wrong_model_is_refused():
    told, _ = run_world(TRAINERS + 1, 0, share, None, update_those_who_are_there, collect_and_leave)
    for nobody, one, none_left, refused in told[:TRAINERS]:
        assert nobody == []
        assert (one, none_left) == (1, 0)
        assert "embed.weight" in refused
    assert told[TRAINERS] == (("1", True), False, True)


@pytest.fixture
def mail():
    """A sender's end, and a receiver's that has registered with it."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(contextlib.closing(ControlServer.open()))
        room = opened.enter_context(contextlib.closing(MailRoom(server.address, 10)))
        mailbox = opened.enter_context(contextlib.closing(Mailbox(server.address, "collector", 10)))
        assert room.receivers() == ["collector"]
        request = DistributedUpdateWeightsReq(
            address=server.address, update=1, layout="", handles=(), trainer_hosts=(), timeout_s=10
        )
        yield room, mailbox, request


def test_the_answer_of_a_receiver_that_has_left_counts(mail):
    """It may leave as soon as it has answered, before the sender asks."""
    room, mailbox, request = mail
    mailbox.answer(DistributedUpdateWeightsOutput(success=True, message="updated"))
    mailbox.close()
    assert room.send("collector", request).message == "updated"
    assert room.receivers() == []


def test_a_receiver_that_leaves_without_an_answer_is_named(mail):
    room, mailbox, request = mail
    mailbox.close()
    with pytest.raises(EngineRefused, match="receiver collector has left"):
        room.send("collector", request)


def test_a_request_arrives_with_the_key_of_its_session_and_travels_without(mail, monkeypatch):
    room, mailbox, request = mail
    frames, written = [], FrameWriter.frame
    monkeypatch.setattr(FrameWriter, "frame", lambda self, message: frames.append(written(self, message)) or frames[-1])
    sent = replace(request, around={"relay": encode(Relay("relay/1", ("a", "b"), 0, 1))})
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(room.send, "collector", sent)
        assert mailbox.request(10) == sent
        mailbox.answer(DistributedUpdateWeightsOutput(success=True, message="updated"))
        assert outcome.result().message == "updated"
    secret = request.address.key
    assert any(b"relay/1" in frame for frame in frames), "the request was seen"
    assert not any(secret.encode() in frame or bytes.fromhex(secret) in frame for frame in frames)


def test_a_request_of_another_control_server_is_not_sent(mail):
    room, _mailbox, request = mail
    with contextlib.closing(ControlServer.open()) as other, pytest.raises(Mismatch, match="another control server"):
        room.send("collector", replace(request, address=other.address))


def test_torn_weights_are_not_read(monkeypatch):
    receiver = ModuleReceiver(Policy())
    monkeypatch.setattr(type(receiver._receiver), "torn", property(lambda _: "update 3 was interrupted"))
    with pytest.raises(TornWeights, match="update 3 was interrupted"), receiver.reading():
        pass


def test_the_example_gives_both_collectors_the_last_weights():
    command = printed("docs/usage/modules.md", "two_collectors.py")
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "no further weights" not in ran.stderr, "its end is no failure"
    for collector in (0, 1):
        assert f"collector {collector}: version 5," in ran.stdout
