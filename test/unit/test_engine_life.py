"""What an engine rank owes its GPU and the trainer: when it unmaps, waits and returns memory. No GPU is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_reshard.engine.prepared import Transfers
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.gpu.runtime import CudaRuntime, use
from sglang_reshard.landings.shadow import check_room
from sglang_reshard.observability.peak_memory import PeakMemory
from sglang_reshard.patches import model_runner
from sglang_reshard.patches.attached import attached
from sglang_reshard.patches.draft_models import Drafts
from support.gpu_runtime import replaced_runtime
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

CPU = torch.device("cpu")


class Noting(CudaRuntime):
    """Notes what is asked of the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def synchronize(self, devices: Any) -> None:
        self.noted.append("synchronize")

    @contextmanager
    def own_stream(self, device: torch.device) -> Iterator[None]:
        try:
            yield
        finally:
            self.noted.append("own stream ended")


@pytest.fixture
def noting() -> Iterator[Noting]:
    with replaced_runtime(Noting()) as noting:
        yield noting


# -- the end of an update


def update_with(trainer: Any, options: dict[str, Any], names: dict[str, str]) -> tuple[float, Any]:
    """When the trainer was answered, and what."""
    sender = trainer.sender()
    weights = [(names.get(name, name), tensor) for name, tensor in checkpoint(1).items()]
    try:
        outcome = sender.update(weights, **options).seconds
    except ReshardError as error:
        outcome = str(error)
    return time.monotonic(), outcome


def unmap_slowly(rank: int, size: int, requests: Any, *_: Any) -> list[float]:
    """When this rank had unmapped, which takes the last one longest."""
    unmapped = []

    class SlowCache(Transfers):
        def unmap(self) -> None:
            time.sleep(0.4 * rank)
            super().unmap()
            unmapped.append(time.monotonic())

    receiver = receiver_of(ToyRank(rank, size))
    receiver._executor.transfers = SlowCache(CPU, live=True)
    for request in requests:
        requests.answer(receiver.update(request))
        unmapped.append(-1.0)
    return unmapped


@pytest.mark.parametrize("names", [{}, {"norm.weight": "no.such.weight"}], ids=["success", "refused"])
def test_the_trainer_is_answered_after_every_engine_rank_has_unmapped(names: dict[str, str]) -> None:
    """Point 16: it frees its memory then, and the KV cache returns."""
    ((answered, outcome),), unmapped = run_world(1, 2, update_with, unmap_slowly, {"unmap_after": True}, names)
    assert isinstance(outcome, str) == bool(names)
    for times in unmapped:
        before_answer = times[: times.index(-1.0)]
        assert before_answer
        assert max(before_answer) < answered, "a rank had the trainer's memory mapped after the answer"


# -- a staged update, beside the model


def fail_staged(rank: int, size: int, requests: Any, *_: Any) -> list[str]:
    noting = Noting()
    use(noting)

    class NotingCache(Transfers):
        def clear(self) -> None:
            noting.noted.append("cleared")
            super().clear()

    class Spoiled(UpdateExecutor):
        def _verify(self, context: Any) -> None:
            raise Mismatch("spoiled")

    receiver = receiver_of(ToyRank(rank, size))
    receiver._executor = Spoiled(TracedModel(ToyRank(rank, size)), rank, CPU)
    receiver._executor.transfers = NotingCache(CPU, live=True)
    for request in requests:
        assert receiver.stage(request).success
        while (output := receiver.staged()) is None:
            time.sleep(0.01)
        requests.answer(output)
        noting.noted.append("answered")
    return noting.noted


def test_buffers_are_freed_after_the_stream_that_writes_them_has_ended() -> None:
    """Point 19: under copies that have not ended, torch would give their memory to somebody else."""
    ((_, outcome),), (noted,) = run_world(1, 1, update_with, fail_staged, {"staged": True}, {})
    assert "spoiled" in outcome
    noted = [event for event in noted if event != "synchronize"]  # before memory is unmapped
    assert noted[noted.index("own stream ended") :][:3] == ["own stream ended", "cleared", "answered"]


# -- the model's own work, and figures of memory


@pytest.mark.parametrize("step", ["update", "commit"])
def test_whatever_the_gpu_does_has_ended_before_live_weights_are_written(noting: Noting, step: str) -> None:
    """A forward pass may be in any stream: SGLang's forward_stream, the scheduler's, one of PD multiplexing's."""

    def write(request: Any, refusal: str) -> str:
        noting.noted.append("written")
        return "output"

    receiver = SimpleNamespace(update=write, commit=write)
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1))
    attached(runner, model_runner.Updated).receiver = receiver
    assert model_runner.update_weights_distributed(runner, SimpleNamespace(lora=()), step, "", Drafts([])) == "output"
    assert noting.noted == ["synchronize", "written"]


class SmallGpu(CudaRuntime):
    """Says that CPU tensors are on a GPU of which `used` bytes are not torch's."""

    used = 1000

    def is_gpu(self, device: torch.device) -> bool:
        return True

    def start_peak(self, device: torch.device) -> int:
        return 10

    def peak_bytes(self, device: torch.device) -> int:
        return 30

    def foreign_bytes(self, device: torch.device) -> int:
        return self.used

    def free_bytes(self, device: torch.device) -> int:
        return 100


@pytest.fixture
def small_gpu() -> Iterator[SmallGpu]:
    with replaced_runtime(SmallGpu()) as gpu:
        yield gpu


def test_memory_outside_of_torchs_allocator_is_reported_apart(small_gpu: SmallGpu) -> None:
    """Point 20: contexts and communicators. What a colocated trainer frees meanwhile does not make it negative."""
    memory = PeakMemory(CPU)
    assert (memory.extra_bytes(), memory.foreign_bytes()) == (20, 0)
    small_gpu.used = 1500
    assert (memory.extra_bytes(), memory.foreign_bytes()) == (20, 500)
    small_gpu.used = 500
    assert memory.foreign_bytes() == 0


def test_shadow_weights_ask_the_gpu_for_room(small_gpu: SmallGpu) -> None:
    check_room(100, 8, CPU)  # other ranks have GPUs of their own
    with pytest.raises(Unsupported, match=r"101 bytes in addition to the weights.* has 100 bytes free"):
        check_room(101, 1, CPU)
