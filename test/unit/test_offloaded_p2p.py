"""Shards that are offloaded anew in every step keep their handles, but are in other memory: that is what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.gpu.runtime import CudaRuntime, use
from support.toy import checkpoint
from support.toy_serving import serve
from support.world import run_world


class Pinned(CudaRuntime):
    """Says that host memory is pinned: it is then copied into an arena, whose handles stay the same."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True


def train(trainer: Any, transport: str) -> list[str]:
    use(Pinned())
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport=transport)
    offloaded, transports = [], []
    for version in (1, 2):
        offloaded.append(checkpoint(version))  # those of the last step may live on
        transports.append(sender.update(offloaded[-1].items(), verify="full").transport)
    sender.close()
    return transports


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_weights_offloaded_to_new_memory_arrive(transport: str) -> None:
    (transports,), (versions,) = run_world(1, 1, train, serve, transport)
    assert transports == [transport] * 2
    assert versions == [1, 2], "the weights of the step before were sent"
