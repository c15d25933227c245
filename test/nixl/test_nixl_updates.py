"""Whole updates in real processes by NIXL over UCX: engine ranks read registered trainer memory, bit-exact."""

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import sweep
from support.toy import ToyRank, checkpoint
from support.toy_trainers import PAIRS, State, assert_told_alike
from support.world import run_world

pytestmark = needs_nixl
MIB = 1 << 20


def train(trainer, mesh_shape, kind, dtype, options, _live_dtype, verify, updates=3):
    use_nixl()
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport="nixl", **options)
    state = State(mesh_shape, kind, dtype)
    reports = []
    for version in range(1, updates + 1):
        state.become(version)
        reports.append(sender.update(state.given, weight_version=str(version), verify=verify))
    sender.close()
    return reports


def serve(rank, size, requests, _mesh_shape, _kind, dtype, _options, live_dtype, _verify):
    use_nixl()
    model = ToyRank(rank, size, live_dtype)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    differing = []
    for version, request in enumerate(requests, start=1):
        output = receiver.update(request)
        requests.answer(output)
        stock = ToyRank(rank, size, live_dtype)
        stock.load_weights(checkpoint(version, dtype).items())
        differing += [(version, n) for n, p in stock.named_parameters() if not torch.equal(getattr(model, n), p)]
    return differing


def run(mesh_shape, engines, kind, dtype=torch.float32, live_dtype=None, verify="off", **options):
    trainers = int(torch.Size(mesh_shape).numel())
    arguments = mesh_shape, kind, dtype, options, live_dtype or dtype, verify
    reports, differing = run_world(trainers, engines, train, serve, *arguments)
    assert differing == [[]] * engines
    assert_told_alike(reports)
    assert {r.transport for r in reports[0]} == {"nixl"}
    return reports[0]


FEW = [((3,), 4, "fsdp"), ((2, 2), 4, "fsdp_tp")]


@pytest.mark.parametrize(("mesh_shape", "engines", "kind"), [pair if pair in FEW else sweep(*pair) for pair in PAIRS])
def test_every_parameter_is_bit_exact_after_each_update(mesh_shape, engines, kind):
    for report in run(mesh_shape, engines, kind):
        sent = sum(t.sent_bytes for t in report.trainer_ranks)
        assert sent == sum(rank.least_bytes for rank in report.engine_ranks)


@pytest.mark.parametrize("bucket_bytes", [sweep(1), 300, sweep(4096)])
def test_any_bucket_size_carries_the_same_bits(bucket_bytes):
    report = run((2,), 4, "tp", bucket_bytes=bucket_bytes)[-1]
    assert report.bucket_bytes == bucket_bytes


def test_casts_and_checksums():
    run((2,), 2, "tp", dtype=torch.float32, live_dtype=torch.bfloat16, verify="full")
