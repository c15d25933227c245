"""Shards that peers could write to, and that change during an update: the trainer rank is told before it trains."""

from __future__ import annotations

from typing import Any

import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.landings.checked.source import TrainerChecks
from sglang_reshard.routes.nixl import source as nixl_source
from support.nixl_env import needs_nixl, use_nixl
from support.toy import ToyRank
from support.toy_changes import HIDDEN, become, sharded
from support.toy_serving import receiver_of
from support.world import run_world

pytestmark = needs_nixl
BF16 = torch.bfloat16


def train(trainer: Any, writable: bool) -> list[str]:
    use_nixl()
    if writable:  # as memory of a GPU is
        nixl_source.read_only_view = lambda storage: None  # type: ignore[assignment]
    sender = trainer.sender(timeout_s=60, transport="nixl")
    weights, told = sharded(1, BF16), []
    real = TrainerChecks.end

    def end(checks: TrainerChecks, update: int, writable: bool) -> None:
        if update == 2:  # somebody writes, once all has been read and verified
            weights["down.weight"].to_local().view(-1)[3] += 1
        real(checks, update, writable)

    TrainerChecks.end = end  # type: ignore[method-assign]
    for version in range(1, 4):
        become(weights, version, BF16)
        try:
            told.append("done" if sender.update(weights.items(), verify="full").success else "failed")
        except ReshardError as error:
            told.append(str(error))
    return told


def serve(rank: int, size: int, requests: Any, _writable: bool) -> None:
    use_nixl()
    receiver = receiver_of(ToyRank(rank, size, BF16, HIDDEN))
    for request in requests:
        requests.answer(receiver.update(request))


def test_shards_that_peers_could_write_to_are_compared_after_the_update() -> None:
    (told,), _ = run_world(1, 1, train, serve, True)
    assert (told[0], told[2]) == ("done", "done")
    assert "the shards of trainer rank 0 changed during update 2" in told[1]
    assert "Do not train on them" in told[1]


def test_shards_that_nobody_can_write_to_are_not() -> None:
    (told,), _ = run_world(1, 1, train, serve, False)
    assert told == ["done"] * 3
