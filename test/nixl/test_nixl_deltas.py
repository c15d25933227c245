"""What has changed, read by NIXL: bit-exact, from a trainer in another dtype than the engine's."""

from __future__ import annotations

from typing import Any

import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.nixl_env import needs_nixl, use_nixl
from support.toy import ToyRank
from support.toy_changes import HIDDEN, become, same, sharded
from support.world import run_world

pytestmark = needs_nixl
BF16 = torch.bfloat16


def four_versions(sender: Any) -> list[Any]:
    weights = sharded(1, torch.float32)
    reports = []
    for version in range(1, 5):
        become(weights, version, torch.float32)
        reports.append(sender.update(weights.items(), verify="full"))
    sender.close()
    return reports


def train(trainer: Any) -> list[Any]:
    use_nixl()
    sender = WeightSender.over(
        trainer.group, trainer.send, timeout_s=30, transport="nixl", delta="auto", bucket_bytes=8192
    )
    return four_versions(sender)


def serve(rank: int, size: int, requests: Any) -> list[bool]:
    use_nixl()
    model = ToyRank(rank, size, BF16, HIDDEN)
    receiver = WeightReceiver(TracedModel(model), rank, size, torch.device("cpu"))
    seen = []
    for request in requests:
        requests.answer(receiver.update(request))
        seen.append(same(model, request.update, torch.float32, BF16))
    return seen


def test_engine_ranks_read_what_has_changed() -> None:
    told, seen = run_world(2, 2, train, serve)
    assert seen == [[True] * 4] * 2
    for reports in told:
        assert [report.delta for report in reports] == [False, True, True, True]
        assert all(report.received_bytes < reports[0].received_bytes / 16 for report in reports[1:])
