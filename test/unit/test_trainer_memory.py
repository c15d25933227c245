"""One handle of each trainer rank is tried before it is mapped, and what cannot be read or has moved is sent again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_reshard.engine import trainer_memory
from sglang_reshard.engine.trainer_memory import TrainerMemory
from sglang_reshard.gpu.runtime import CudaRuntime, use
from support import toy_serving
from support.toy import checkpoint
from support.toy_trainers import State
from support.world import run_world

CPU = torch.device("cpu")
READS = {0: "wx", 1: "y"}  # trainer rank -> what is read of it
NO_HANDLES = "its GPU memory has no CUDA IPC handle"


class Trace:
    """Stands in for the session and for what opens handles, and records what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.reasons: dict[str, str] = {}
        monkeypatch.setattr(trainer_memory, "check_handles", lambda *_: None)
        monkeypatch.setattr(trainer_memory, "unreadable_reason", self.try_one)
        monkeypatch.setattr(trainer_memory, "PeerMemory", self.map)
        monkeypatch.setattr(trainer_memory, "unmap", self.unmap)

    def get(self, key: str, *_: object) -> str:
        digest = key.rpartition("/")[2]
        self.done.append(f"fetch {digest}")
        return digest

    def try_one(self, handles: str, trainer_rank: int, device: torch.device) -> str:
        self.done.append(f"try {handles}")
        return self.reasons.get(handles, "")

    def map(self, trainer_rank: int, handles: str, device: torch.device, reads: Any) -> Any:
        self.done.append(f"map {reads} of {handles}")
        return SimpleNamespace(handles=handles, covers=lambda others: set(others) <= set(reads))

    def unmap(self, memories: Any) -> None:
        if memories:
            self.done.append(f"close {' '.join(memory.handles for memory in memories)}")

    def since(self) -> list[str]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Trace:
    return Trace(monkeypatch)


def asked(seen: Trace, *handles: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(handles=handles, timeout_s=1.0), session=seen)


def test_old_memory_is_unmapped_before_a_new_handle_is_tried(seen):
    """Its address, and even its handle, may be those of the new memory."""
    memory = TrainerMemory(CPU)
    memory.unreadable([0, 1], asked(seen, "a0", "b0"), None)
    memory.map(READS, asked(seen, "a0", "b0"), None)
    seen.since()
    memory.unreadable([0, 1], asked(seen, "a0", "b1"), None)
    memory.map(READS, asked(seen, "a0", "b1"), None)
    assert seen.since() == ["close b0", "fetch b1", "try b1", "map y of b1"]
    memory.unreadable([0, 1], asked(seen, "a1", "b2"), None)
    assert seen.since()[0] == "close a0 b1", "together"


# -- end to end, on a host without GPUs: engine rank 1 cannot map trainer rank 0's memory for a while


def train(trainer):
    sender = trainer.sender()
    found = []
    state = State((2,), "fsdp", torch.float32)
    for version in (1, 2, 3):
        if version == 3:
            state = State((2,), "fsdp", torch.float32)  # in other memory
        state.become(version)
        report = sender.update(state.given, weight_version=str(version))
        assert all(rank.received_bytes == rank.least_bytes for rank in report.engine_ranks)
        found.append((report.transport, report.transport_reason))
    return found


def serve(rank, size, requests):
    real, tries = trainer_memory.unreadable_reason, []

    def reason(handles, trainer_rank, device):
        tries.append(trainer_rank)
        first = len(tries) <= 2
        return NO_HANDLES if (rank, trainer_rank) == (1, 0) and first else real(handles, trainer_rank, device)

    trainer_memory.unreadable_reason = reason
    return tries, toy_serving.serve(rank, size, requests)


def test_a_pair_that_cannot_read_is_sent_to_until_it_can():
    trainers, engines = run_world(2, 2, train, serve)
    first, warm, moved = trainers[0]
    assert first[0] == warm[0] == "ipc+p2p"
    assert f"engine rank 1 cannot map the memory of trainer rank 0: {NO_HANDLES}" in first[1]
    assert moved[0] == "ipc"
    for tries, versions in engines:
        assert sorted(tries) == [0, 0, 1, 1], "once for each set of handles"
        assert versions == [1, 2, 3]


# -- shards that are offloaded anew in every step keep their handles, but are in other memory


class Pinned(CudaRuntime):
    """Says that host memory is pinned: it is then copied into an arena, whose handles stay the same."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True


def train_offloaded(trainer: Any, transport: str) -> list[str]:
    use(Pinned())
    sender = trainer.sender(transport=transport)
    offloaded, transports = [], []
    for version in (1, 2):
        offloaded.append(checkpoint(version))  # those of the last step may live on
        transports.append(sender.update(offloaded[-1].items(), verify="full").transport)
    return transports


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_weights_offloaded_to_new_memory_arrive(transport: str) -> None:
    (transports,), (versions,) = run_world(1, 1, train_offloaded, toy_serving.serve, transport)
    assert transports == [transport] * 2
    assert versions == [1, 2], "the weights of the step before were sent"
