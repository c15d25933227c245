"""A trainer captures CUDA graphs while an update runs behind its back, and no call of the update breaks a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_reshard.gpu.runtime import CudaRuntime
from support.gpu_jobs import Job, serve, train_in_background
from support.virtual_gpus.description import Place
from support.virtual_gpus.journal import RuleBroken
from support.virtual_gpus.world import run_with_gpus, virtual_gpus

UPDATES = 3


def run(trainers: str, engines: str, train: Any = train_in_background, **options: Any) -> Any:
    job = Job((2,), 2, updates=UPDATES, **options)
    # The copy is freed with the sender, before engine ranks notice that and unmap it.
    with virtual_gpus(hosts=("a", "b"), gpus=4, freed_while_mapped="undefined") as gpus:
        of_trainers = [Place(trainers, (n,)) for n in range(2)]
        of_engines = [Place(engines, (2, 3), n) for n in range(2)]
        return run_with_gpus(gpus, of_trainers, of_engines, train, serve, job)


@pytest.mark.parametrize(
    ("engines", "options"),
    [
        ("a", {"transport": "ipc"}),
        ("b", {"transport": "nixl"}),
        ("b", {"transport": "p2p"}),
        ("b", {"transport": "p2p", "delta": "auto"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("verify", ["off", "full"])
def test_an_update_in_the_background_breaks_no_capture(engines, options, verify):
    trained, served = run("a", engines, options=options, update_options={"verify": verify})
    assert all(not s.differing and s.versions == ["1", "2", "3"] for s in served)
    assert [report.transport for report in trained[0]] == [options["transport"]] * UPDATES


def train_waiting_for_devices(trainer, process, job):
    CudaRuntime.event = lambda self, device: AnEvent(device)  # type: ignore[method-assign,assignment,return-value]
    return train_in_background(trainer, process, job)


class AnEvent:
    """As the update waited before: for all of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def test_a_wait_for_a_device_breaks_captures():
    with pytest.raises(RuleBroken, match="cudaDeviceSynchronize was called while a graph was captured"):
        run("a", "a", train_waiting_for_devices, options={"transport": "ipc"})


def train_without_relaxing(trainer, process, job):
    CudaRuntime.spare_captures = lambda self: None  # type: ignore[method-assign]
    return train_in_background(trainer, process, job)


def test_calls_of_a_thread_that_has_not_relaxed_its_mode_break_captures():
    with pytest.raises(RuleBroken, match=r"cuda\w+ was called while a graph was captured, in a thread that had not"):
        run("a", "a", train_without_relaxing, options={"transport": "ipc"})
