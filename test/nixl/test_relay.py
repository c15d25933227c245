"""Engines of several sizes pass on weights to each other by NIXL, while they read: bit-exact, and read once."""

import itertools

import pytest
import torch

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.errors import Unsupported
from support.nixl_env import needs_nixl, use_nixl
from support.several_engines import place, relaying_sender, sends_of
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of
from support.toy_trainers import State, assert_told_alike
from support.world import run_world

pytestmark = needs_nixl
UPDATES = 3


def train(trainer, sizes, mesh_shape, kind, dtype, _live_dtypes, options):
    use_nixl()
    sender, _host = relaying_sender(trainer, **options)
    sender.set_engines(sends_of(trainer, sizes))
    state, told = State(mesh_shape, kind, dtype), []
    for version in range(1, UPDATES + 1):
        state.become(version)
        told.append(sender.update(state.given, weight_version=str(version), verify="full"))
    sender.close()
    return told


def serve(rank, _size, requests, sizes, _mesh_shape, _kind, dtype, live_dtypes, _options):
    use_nixl()
    engine, rank = place(rank, sizes)
    model = ToyRank(rank, sizes[engine], live_dtypes[engine])
    updates = enumerate(answered(receiver_of(model), requests), start=1)
    return [(version, name) for version, _ in updates for name in model.differing(checkpoint(version, dtype))]


def run(sizes, mesh_shape, kind, dtype=torch.float32, live_dtypes=None, **options):
    trainers = int(torch.Size(mesh_shape).numel())
    live = live_dtypes or (dtype,) * len(sizes)
    told, differing = run_world(trainers, sum(sizes), train, serve, sizes, mesh_shape, kind, dtype, live, options)
    assert differing == [[]] * sum(sizes)
    assert_told_alike([list(itertools.chain.from_iterable(reports.values() for reports in rank)) for rank in told])
    return told[0]


def test_what_another_dtype_would_round_is_read_from_the_trainer():
    for reports in run((1, 1), (1,), "tp", torch.float32, (torch.float32, torch.bfloat16)):
        assert all(report.relayed_bytes == 0 for report in reports.values())


def test_casts_are_made_once():
    for reports in run((1, 2), (1,), "tp", torch.float32, (torch.bfloat16, torch.bfloat16), bucket_bytes=4096):
        assert all(report.relayed_bytes for report in reports.values())


@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_other_transports_are_refused(transport):
    with pytest.raises(Unsupported, match="relay=True needs transport='nixl'"):
        MultiEngineSender(None, trainer_rank=0, global_ranks=(0,), relay=True, transport=transport)
