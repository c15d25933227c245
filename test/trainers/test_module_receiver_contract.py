"""A receiver waits as TorchRL's receivers do, outlives its sender, and takes a state dict as strictly as torch does."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sglang_reshard import ModuleReceiver, ModuleSender
from sglang_reshard.errors import ConnectionLost, EngineRefused, Mismatch, Unsupported
from sglang_reshard.extras.modules.receiver import StateDictModel
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support.world import run_world

LONG_S = 30


def policy(version=0, **sizes):
    """Parameters, and buffers of three dtypes, all different in every version."""
    module = nn.Sequential(nn.Linear(4, sizes.get("width", 3)), nn.BatchNorm1d(sizes.get("width", 3)))
    module.register_buffer("mask", torch.tensor([version % 2 == 1, False]))
    module.register_buffer("scratch", torch.full((2,), float(version)), persistent=False)
    with torch.no_grad():
        for number, tensor in enumerate(module.state_dict().values()):
            if tensor.dtype != torch.bool:
                tensor.copy_(torch.full_like(tensor, 100 * version + number))
    return module


def same(module, version):
    """Whether torch's own load of that version leaves the same."""
    loaded = policy()
    loaded.load_state_dict(policy(version).state_dict())
    return all(map(torch.equal, module.state_dict().values(), loaded.state_dict().values()))


def metadata_of(sender):
    said = [sender.metadata if sender is not None else None]
    dist.broadcast_object_list(said, 0)
    return said[0]


def meet(trainer, send, receive):
    """Runs `send` on a trainer rank with its sender, and `receive` with the metadata in another process."""
    group = dist.new_group([0])
    if trainer.rank:
        return receive(metadata_of(None))
    sender = ModuleSender(group, timeout_s=LONG_S)
    metadata_of(sender)
    sender.wait_for_receivers(1, LONG_S)
    found = send(sender, group)
    sender.close()
    return found


def met(send, receive):
    (sent, received), _ = run_world(2, 0, meet, None, send, receive)
    return sent, received


class Waiting:
    """A call in a thread, which is waiting now."""

    def __init__(self, call):
        self._result = []
        self._thread = threading.Thread(target=lambda: self._result.append(call()), daemon=True)
        self._thread.start()
        self._thread.join(0.3)
        assert self._thread.is_alive(), self._result

    def result(self):
        self._thread.join(LONG_S)
        return self._result[0]


# -- waits


def send_when_asked(sender, _):
    dist.barrier()  # the receiver waits
    sender.update(policy(1), weight_version="1")
    sender.update(policy(2))
    dist.barrier()
    dist.barrier()  # it waits again
    with pytest.raises(
        EngineRefused, match=r"0\.weight is sent with shape \[5, 4\], but the module's has shape \[3, 4\]"
    ):
        sender.update(policy(3, width=5), weight_version="3")
    sender.update(policy(4), weight_version="4")
    dist.barrier()  # it has left
    return sender.update(policy(5))


def wait_in_every_way(metadata):
    module = policy()
    receiver = ModuleReceiver(module)
    receiver.init(metadata)
    waiting = Waiting(receiver.receive)
    with pytest.raises(Mismatch, match="another thread is already waiting for weights"):
        receiver.poll_and_apply()
    dist.barrier()
    seen = [(waiting.result(), receiver.version, same(module, 1))]
    seen.append((receiver.receive(LONG_S), receiver.version, same(module, 2)))
    dist.barrier()
    began = time.monotonic()
    assert receiver.receive(0.2) is None
    assert 0.2 <= time.monotonic() - began < LONG_S
    assert receiver.poll_and_apply() is False
    assert receiver.receive(0) is None
    with pytest.raises(Mismatch, match="not a number of seconds"):
        receiver.poll_and_apply(float("nan"))
    waiting = Waiting(lambda: receiver.receive(float("inf")))
    dist.barrier()
    seen.append((waiting.result(), receiver.version, same(module, 4)))  # past the update that it has refused
    waiting = Waiting(lambda: receiver.poll_and_apply(None))
    receiver.close()
    assert waiting.result() is False
    dist.barrier()
    return seen


def test_it_waits_without_a_limit_and_past_timeouts_and_refusals_until_it_is_closed():
    after, seen = met(send_when_asked, wait_in_every_way)
    assert seen == [("1", "1", True), ("", None, True), ("4", "4", True)]
    assert after == {}


def send_to_the_interrupted(sender, _):
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(EngineRefused, match="KeyboardInterrupt interrupted the receiver while it applied"):
        sender.update(policy(1), weight_version="1")
    seconds = time.monotonic() - began
    sender.update(policy(2), weight_version="2")
    return seconds


def be_interrupted(metadata):
    module = policy()
    receiver = ModuleReceiver(module)
    receiver.init(metadata)
    interrupted_once = threading.Event()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it

    def interrupt():
        """Again after some seconds: Python drops what a signal raises within a `__del__`."""
        wait_s = 0.3
        while not interrupted_once.wait(wait_s):
            os.kill(os.getpid(), signal.SIGINT)
            wait_s = 5.0

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        receiver.receive()
    interrupted_once.set()
    dist.barrier()
    update = receiver._receiver.update

    def interrupted(request):
        receiver._receiver.update = update
        raise KeyboardInterrupt

    receiver._receiver.update = interrupted
    with pytest.raises(KeyboardInterrupt):
        receiver.receive()
    seen = receiver.receive(), same(module, 2)
    receiver.close()
    return seen


def test_ctrl_c_ends_a_wait_and_an_update_and_the_next_update_is_taken():
    seconds, seen = met(send_to_the_interrupted, be_interrupted)
    assert seen == ("2", True)
    assert seconds < LONG_S / 2


# -- a sender that ends


def send_and_end_twice(sender, group):
    sender.update(policy(1), weight_version="1")
    sender.close()
    for version in (2, 3):
        sender = ModuleSender(group, timeout_s=LONG_S)
        metadata_of(sender)
        sender.wait_for_receivers(1, LONG_S)
        sender.update(policy(version), weight_version=str(version))
        sender.close()
        dist.barrier()


def outlive(metadata):
    module = policy()
    receiver = ModuleReceiver(module)
    receiver.init(metadata)
    assert receiver.receive(LONG_S) == "1"
    with pytest.raises(ConnectionLost, match=r"ended the session.*call init with the metadata"):
        receiver.receive()
    with pytest.raises(Mismatch, match="not the metadata of a ModuleSender"):
        receiver.init({"0.weight": (torch.float32, (3, 4))})
    assert same(module, 1)
    receiver.init(metadata_of(None))
    with pytest.raises(Mismatch, match="init was already called"):
        receiver.init(metadata)
    seen = [(receiver.receive(LONG_S), same(module, 2))]
    dist.barrier()
    while not receiver._mailbox.is_lost:
        time.sleep(0.01)
    receiver.init(metadata_of(None))
    receiver.start()
    with pytest.raises(Mismatch, match="start was already called"):
        receiver.start()
    while receiver.version != "3":
        time.sleep(0.01)
    with receiver.reading():
        seen.append((receiver.version, same(module, 3)))
    receiver.close()
    dist.barrier()
    return seen


def test_it_can_be_given_the_next_sender_when_one_has_ended():
    _, seen = met(send_and_end_twice, outlive)
    assert seen == [("2", True), ("3", True)]


# -- modules that have other tensors than are sent


def wider(version=0):
    module = policy(version)
    module.append(nn.Linear(2, 2))
    module.register_buffer("scale", torch.ones(1))
    return module


def send_to_a_wider_module(sender, _):
    with pytest.raises(EngineRefused) as refused:
        sender.update(policy(1), weight_version="1")
    dist.barrier()
    sender.wait_for_receivers(2, LONG_S)
    narrow = [*policy(1).state_dict().items(), ("more", torch.ones(2))]
    for version in (1, 2):
        sender.update(narrow, weight_version=str(version), verify="full")
    return str(refused.value)


def take_into_a_wider_module(metadata):
    module = wider()
    built = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    strict = ModuleReceiver(module)
    strict.init(metadata)
    assert strict.poll_and_apply(LONG_S) is False
    strict.close()
    kept = all(map(torch.equal, module.state_dict().values(), built.values()))
    loose = ModuleReceiver(module, strict=False)
    loose.init(metadata)
    dist.barrier()
    versions = loose.receive(LONG_S), loose.receive(LONG_S)
    loose.close()
    module_of_torch = wider()
    module_of_torch.load_state_dict(built)
    module_of_torch.load_state_dict(policy(1).state_dict(), strict=False)
    equal = map(torch.equal, module.state_dict().values(), module_of_torch.state_dict().values())
    return kept, versions, all(equal), module.scratch.tolist()


def test_a_module_with_more_tensors_is_refused_or_keeps_them():
    refused, (kept, versions, equal, scratch) = met(send_to_a_wider_module, take_into_a_wider_module)
    assert "the module has scale, 2.weight, 2.bias, which the trainer does not send" in refused
    assert "strict=False" in refused
    assert kept
    assert versions == ("1", "2")
    assert equal
    assert scratch == [0, 0]  # not persistent, so it is in no state dict


def specs(module):
    return [
        TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in module.state_dict().items()
        if isinstance(t, torch.Tensor)
    ]


@pytest.mark.parametrize("buffer", ["1.running_mean", "1.num_batches_tracked", "mask"])
def test_a_persistent_buffer_that_is_not_sent_is_named(buffer):
    sent = [spec for spec in specs(policy()) if spec.name != buffer]
    with pytest.raises(Mismatch, match=f"the module has {buffer}, which the trainer does not send"):
        trace(StateDictModel(policy(), strict=True), sent)
    program = trace(StateDictModel(policy(), strict=False), sent)
    assert {copy.source for copy in program.copies} == {spec.name for spec in sent}


def test_a_tensor_that_would_be_broadcast_is_named():
    sent = [TensorSpec("0.bias", (1,), "float32") if spec.name == "0.bias" else spec for spec in specs(policy())]
    for strict in (True, False):
        with pytest.raises(Mismatch, match=r"0\.bias is sent with shape \[1\], but the module's has shape \[3\]"):
            trace(StateDictModel(policy(), strict=strict), sent)


def test_a_tied_tensor_need_be_sent_under_one_of_its_names():
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    for name in ("embed.weight", "head.weight"):
        program = trace(StateDictModel(module, strict=True), [TensorSpec(name, (5, 4), "float32")])
        assert [copy.source for copy in program.copies] == [name]


class Running(nn.Linear):
    """Has state that is no tensor of the module."""

    def __init__(self, state):
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_state_that_is_no_tensor_of_the_module_is_named():
    sent = [spec for spec in specs(Running({"mean": 1.0})) if not spec.name.endswith("_extra_state")]
    with pytest.raises(
        Unsupported,
        match="the module has extra state that is neither a parameter nor a buffer and is not sent: _extra_state",
    ):
        trace(StateDictModel(Running({"mean": 1.0}), strict=True), sent)
    for state, strict in ((None, True), (torch.empty(0), True), ({"mean": 1.0}, False)):
        assert len(trace(StateDictModel(Running(state), strict=strict), sent).copies) == 2
    sent.append(TensorSpec("_extra_state", (3,), "float32"))
    with pytest.raises(Unsupported, match="_extra_state is in the module's state dict but is neither a parameter"):
        trace(StateDictModel(Running(torch.ones(3)), strict=False), sent)
