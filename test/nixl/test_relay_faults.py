"""Engines that do not pass on what the others wait for: these read it from the trainer, in the same update."""

import torch

from sglang_reshard.routes.relay import progress as relay
from sglang_reshard.routes.relay.progress import Progress
from support.nixl_env import needs_nixl, use_nixl
from support.several_engines import relaying_sender, sends_of
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

pytestmark = needs_nixl
HIDDEN, UPDATES, FAULTY = 256, 4, 2  # the second update goes wrong
SIZES = (1, 2, 1)
STALLED_S = 4.0  # where an engine is silent: a healthy rank that waits for two busy cores is never silent for so long


def train(trainer, _breaks):
    use_nixl()
    sender, _host = relaying_sender(trainer, bucket_bytes=2**18)
    sender.set_engines(sends_of(trainer, SIZES))
    told = []
    for version in range(1, UPDATES + 1):
        weights = checkpoint(version, hidden=HIDDEN)
        told.append(sender.update(weights.items(), weight_version=str(version), on_failure="raise"))
    sender.close()
    return told


def serve(rank, _size, requests, breaks):
    """Engine 1 has two ranks; its second one, or both, break in the faulty update. It waits for the others as long as
    it takes, since the others are healthy."""
    use_nixl()
    engine, rank = [(0, 0), (1, 0), (1, 1), (2, 0)][rank]
    model = ToyRank(rank, SIZES[engine], hidden=HIDDEN)
    receiver = receiver_of(model)
    for version, request in enumerate(requests, start=1):
        relay.STALLED_S = STALLED_S if breaks is says_nothing and version == FAULTY and engine != 1 else 60.0
        mend = breaks(model, rank) if engine == 1 and version == FAULTY else None
        output = receiver.update(request)
        if mend is not None:
            mend()
        requests.answer(output)
        if output.success:
            differing = model.differing(checkpoint(version, hidden=HIDDEN))
            assert not differing, (version, differing)


def run(breaks):
    """The reports of the faulty update."""
    (told,), _ = run_world(1, sum(SIZES), train, serve, breaks)
    first, faulty, *later = told
    for reports in (first, *later):
        assert all(report.relayed_bytes and not report.message for report in reports.values())
    return faulty


def says_nothing(_model, _rank):
    stock = Progress.advance
    Progress.advance = lambda *_: None
    return lambda: setattr(Progress, "advance", stock)


def test_an_engine_passes_on_nothing():
    faulty = run(says_nothing)
    assert f"replica 1 has read nothing for {STALLED_S:g} s" in faulty["replica 0"].message
    assert not faulty["replica 1"].message


def moves(model, _rank):
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(parameter.clone(), requires_grad=False))
    return lambda: None


def test_an_engine_has_new_memory():
    faulty = run(moves)
    assert "replica 1 was not updated" in faulty["replica 0"].message
    assert "has different memory than it offered" in faulty["replica 1"].message
