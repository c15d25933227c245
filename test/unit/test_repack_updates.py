"""Whole updates in real processes of a model that is repacked after loading: every transport, staged or not."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import sweep
from support.toy_repacking import Repacking, live_tensors, started, weights
from support.world import run_world

LAYERS, ROWS, TRAINERS, ENGINES = 40, 24, 4, 2
BUCKET_BYTES = 1024


def train(trainer, transport, options, updates=3):
    use_nixl()
    sender = WeightSender.over(
        trainer.group, trainer.send, timeout_s=30, transport=transport, bucket_bytes=BUCKET_BYTES
    )
    mesh = init_device_mesh("cpu", (TRAINERS,))
    reports = []
    for version in range(1, updates + 1):
        given = weights(version, LAYERS, ROWS)
        placed = {n: [Shard(0)] if n.endswith("weight") else [Replicate()] for n in given}
        shards = {n: distribute_tensor(t, mesh, placed[n]) for n, t in given.items()}
        reports.append(sender.update(shards.items(), weight_version=str(version), **options))
    sender.close()
    return reports


def serve(rank, size, requests, _transport, _options):
    use_nixl()
    model = started(Repacking(LAYERS, ROWS, rank, size), weights(0, LAYERS, ROWS))
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    differing = []
    for version, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request))
        landing = receiver._executor.transfer.landing
        assert 0 < landing.nbytes < sum(a.nbytes for a in landing.program.arrivals.values()) / 2, "layer by layer"
        right = live_tensors(started(Repacking(LAYERS, ROWS, rank, size), weights(version, LAYERS, ROWS)))
        differing += [(version, name) for name, t in live_tensors(model).items() if not torch.equal(t, right[name])]
    return differing


@pytest.mark.parametrize("options", [{"verify": "full"}, sweep({"staged": True, "verify": "sample"})], ids=str)
@pytest.mark.parametrize("transport", ["ipc", "p2p", sweep("broadcast"), pytest.param("nixl", marks=needs_nixl)])
def test_engine_ranks_hold_what_a_start_on_the_weights_leaves(transport, options):
    reports, differing = run_world(TRAINERS, ENGINES, train, serve, transport, options)
    assert differing == [[]] * ENGINES
    assert {report.transport for report in reports[0]} == {transport}
