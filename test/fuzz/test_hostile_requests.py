"""Whatever an engine is asked for, and whatever lies in the session: it refuses, and keeps its weights, or does it."""

import contextlib
import os
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fuzz.arbitrary import changed, value_of
from fuzz.settings import fuzzed
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.errors import ReshardError
from sglang_reshard.memory.mapping import MemoryExporter, host_identity
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, decode, encode
from sglang_reshard.protocol.session import Session, handles_key
from sglang_reshard.protocol.update_channel import update_scope
from sglang_reshard.sources import describe
from sglang_reshard.version import PROTOCOL, __version__
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of

HOSTS = ("127.0.0.1", "::1", "", "256.0.0.1", "\0", "-")  # no name that somebody would have to be asked for
SOON_S = 0.05
CPU = torch.device("cpu")


@dataclass(repr=False)
class Stage:
    """A session with a trainer's layout and handles in it, spoiled ones beside them, and an engine of one rank."""

    session: Session
    weights: dict[str, torch.Tensor]
    layouts: list[str]
    handles: list[str]
    request: DistributedUpdateWeightsReq
    model: Any
    receiver: WeightReceiver

    def reset(self) -> None:
        self.model.load_weights(checkpoint(0).items())

    def weighs(self, version: int) -> bool:
        like = ToyRank(0, 1)
        like.load_weights(checkpoint(version).items())
        live = dict(self.model.named_parameters())
        return all(torch.equal(p, live[n]) for n, p in like.named_parameters())


@pytest.fixture(scope="module")
def stage():
    random = Random(1)
    session = Session.host(timeout_s=10)
    weights = checkpoint(1)
    state = describe(list(weights.items()), trainer_rank=0, global_ranks=(0,))
    exported = MemoryExporter(0).export(state.shards)
    layouts, handles = [session.put(state.layout)], [session.put(exported, handles_key(0))]
    for _ in range(40):
        layouts.append(session.put(changed(state.layout, random)))
        handles.append(session.put(changed(exported, random), handles_key(0)))
    request = DistributedUpdateWeightsReq(
        address=session.address,
        update=1,
        layout=layouts[0],
        handles=(handles[0],),
        trainer_hosts=(host_identity(),),
        transport="ipc",
        timeout_s=SOON_S,
        package_version=__version__,
        protocol=PROTOCOL,
    )
    model = ToyRank(0, 1)
    found = Stage(session, weights, layouts, handles, request, model, receiver_of(model))
    yield found
    session.end(1)
    assert [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name] == []  # as torch names its own


def asked(stage, random):
    """A request, as it comes from the wire; or None where it does not get that far."""
    request = replace(stage.request, update=random.randrange(1 << 40), timeout_s=random.choice((SOON_S, 30.0)))
    for _ in range(random.choice((0, 1, 1, 2))):
        request = changed(request, random)
    if random.random() < 0.1:
        request = value_of(DistributedUpdateWeightsReq, random)
    if random.random() < 0.4:
        request = replace(request, layout=random.choice(stage.layouts))
    if random.random() < 0.4:
        request = replace(request, handles=(random.choice(stage.handles),) * random.choice((1, 1, 1, 2)))
    try:
        request = decode(encode(request), DistributedUpdateWeightsReq)
    except Exception:  # what does not decode is test_hostile_bytes' matter
        return None
    if SOON_S < request.timeout_s < float("inf"):  # nobody is there who would end a longer wait
        request = replace(request, timeout_s=SOON_S)
    if request.address.host != stage.request.address.host:
        request = replace(request, address=replace(request.address, host=random.choice(HOSTS)))
    return request


@contextlib.contextmanager
def trainer_in(stage, request):
    """A trainer rank that is in the update, as far as the control server lets it, and does nothing there."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ReshardError):
            stack.enter_context(stage.session.trainer_channel(request.update, "trainer rank 0"))
            stage.session.client.wait((), 10, update_scope(request.update))  # entering does not wait for the server
        yield


@fuzzed
def test_an_engine_refuses_and_keeps_its_weights_or_takes_the_new_ones(stage, random):
    request = asked(stage, random)
    if request is None:
        return
    stage.reset()
    stage.receiver._executor.last.torn = ""
    with trainer_in(stage, request):
        output = stage.receiver.update(request)
    assert isinstance(output, DistributedUpdateWeightsOutput)
    if output.success:
        # Handles of other places in the trainer's own memory are no lie that can be seen.
        honest = request.layout == stage.layouts[0] and request.handles == (stage.handles[0],)
        assert not honest or stage.weighs(1)
    elif not output.torn:
        assert output.message
        assert stage.weighs(0)
    assert output.torn == bool(stage.receiver.torn)


def test_in_earnest_it_does(stage):
    """Otherwise all of the above would be refused for a reason of its own."""
    stage.reset()
    request = replace(stage.request, timeout_s=30.0)
    with trainer_in(stage, request):
        output = stage.receiver.update(request)
    assert output.success, output.message
    assert stage.weighs(1)
