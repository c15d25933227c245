"""Updates behind the trainer's next step: from a copy of its shards, one at a time, with failures that are seen."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from benchmark import async_updates
from benchmark.matrices import Matrices
from sglang_reshard import tasks
from sglang_reshard.errors import (
    Aborted,
    DeadlineExceeded,
    EngineRefused,
    Mismatch,
    ReshardError,
    Unsupported,
)
from sglang_reshard.extras.asynchronous.background import UpdateHandle
from support.sweep import sweep
from support.toy import checkpoint
from support.toy_serving import serve
from support.world import run_world

TRAINERS = ENGINES = 2


def fsdp(version: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (TRAINERS,))
    return {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in checkpoint(version).items()}


def become(weights: dict[str, Any], version: int | None) -> None:
    """Writes a version, or garbage, where the weights are."""
    with torch.no_grad():
        for name, tensor in weights.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if version is None:
                local.fill_(float("nan"))
            else:
                local.copy_(fsdp(version)[name].to_local())


def step_meanwhile(trainer: Any, transport: str, options: dict[str, Any]) -> tuple[list[Any], int, int]:
    """The weights are garbage as soon as the call returns."""
    sender = trainer.sender(transport=transport)
    weights = fsdp(1)
    reports = []
    for version in (1, 2, 3):
        become(weights, version)
        handle = sender.update_async(weights.items(), weight_version=str(version), **options)
        become(weights, None)
        reports.append(handle.wait(30))
        assert handle.done()
    shards = sum(w.to_local().numel() * 4 for w in weights.values())
    held = sender.background.shadow_bytes
    memory = StorageWeakRef(sender.background._shadow._state.shards[0].untyped_storage())
    assert not memory.expired()
    sender.release()
    assert sender.background.shadow_bytes == 0
    assert memory.expired(), "something keeps the copy"
    become(weights, 3)
    sender.update_async(weights.items(), weight_version="4", **options).wait(30)
    return reports, shards, held


@pytest.mark.parametrize("options", [{}, sweep({"staged": True, "verify": "full"})], ids=str)
@pytest.mark.parametrize("transport", ["ipc", "p2p", sweep("broadcast")])
def test_the_weights_are_those_of_the_call(transport: str, options: dict[str, Any]) -> None:
    told, seen = run_world(TRAINERS, ENGINES, step_meanwhile, serve, transport, options)
    assert seen == [[1, 2, 3, 3]] * ENGINES
    for reports, shards, held in told:
        assert {report.transport for report in reports} == {transport}
        assert shards <= held <= shards + 256 * 8, "one shard's worth"
        planned = [any("plan" in rank.seconds for rank in report.engine_ranks) for report in reports]
        assert planned == [True, False, False], "a copy at the same place is what is known already"


class Slow:
    """An engine rank that holds each update until it is told."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def send(self, send: Any) -> Any:
        def slowly(request: Any) -> Any:
            self.begun.set()
            assert self.go.wait(30)
            self.begun.clear()
            self.go.clear()
            return send(request)

        return slowly


def one_at_a_time(trainer: Any) -> dict[str, Any]:
    slow = Slow()
    sender = trainer.sender(slow.send, transport="ipc")
    weights = fsdp(1)
    first = sender.update_async(weights.items(), weight_version="1")
    seen: dict[str, Any] = {"running": not first.done()}
    with pytest.raises(DeadlineExceeded, match=r"version '1' has not ended within 0\.1 s and is still running"):
        first.wait(0.1)
    with pytest.raises(Mismatch, match="update 1 is running in another thread; wait for it to return"):
        sender.update(weights.items(), weight_version="9")
    become(weights, 2)
    skipped = [sender.update_async(weights.items(), weight_version=v, latest_only=True) for v in ("2", "3")]
    seen["skipped"] = [(h.skipped, h.done(), h.wait()) for h in skipped]
    slow.go.set()
    first.wait(30)
    become(weights, 4)
    slow.go.set()
    last = sender.update_async(weights.items(), weight_version="4", latest_only=True)
    seen["last"] = last.skipped, last.skipped_before, last.wait(30).weight_version
    become(weights, 5)
    slow.go.set()
    sender.update_async(weights.items(), weight_version="5")
    sender.close()  # waits
    return seen


def test_one_runs_at_a_time_and_versions_are_skipped_by_name() -> None:
    told, seen = run_world(TRAINERS, ENGINES, one_at_a_time, serve)
    for of in told:
        assert of["running"]
        assert of["skipped"] == [(True, True, None)] * 2
        assert of["last"] == (False, ("2", "3"), "4")
    assert seen == [[1, 4, 5]] * ENGINES


def failures(trainer: Any) -> list[str]:
    sender = trainer.sender(transport="ipc")
    weights = fsdp(1)
    wrong = {**weights, "no.such.weight": fsdp(1)["norm.weight"]}
    told = []

    def refused(call: Any, kind: type[ReshardError]) -> None:
        with pytest.raises(kind) as error:
            call()
        told.append(str(error.value))

    refused(sender.update_async(wrong.items(), weight_version="1").wait, EngineRefused)
    sender.update_async(wrong.items(), weight_version="1")
    refused(lambda: sender.update_async(weights.items(), weight_version="1"), EngineRefused)
    sender.update_async(weights.items(), weight_version="1").wait(30)
    sparse = {**weights, "norm.weight": torch.zeros(16).to_sparse()} if trainer.rank == 1 else weights
    refused(sender.update_async(sparse.items(), weight_version="2").wait, ReshardError)
    become(weights, 3)
    sender.update_async(weights.items(), weight_version="3").wait(30)
    return told


def test_failures_are_raised_by_the_handle_or_the_next_call() -> None:
    told, seen = run_world(TRAINERS, ENGINES, failures, serve)
    for at_wait, at_next_call, of_one_rank in told:
        assert "no.such.weight" in at_wait
        assert "no.such.weight" in at_next_call
        assert "trainer rank 1" in of_one_rank
        assert "norm.weight" in of_one_rank
    assert [versions[-1] for versions in seen] == [3] * ENGINES


def no_room(trainer: Any) -> str:
    sender = trainer.sender(transport="ipc")
    weights = fsdp(1)
    with pytest.MonkeyPatch.context() as patch:
        if trainer.rank == 1:
            patch.setattr("sglang_reshard.extras.asynchronous.background.torch.empty", _no_memory)
        handle = sender.update_async(weights.items(), weight_version="1")
    with pytest.raises(Unsupported) as error:
        handle.wait(30)
    sender.update_async(weights.items(), weight_version="1").wait(30)
    return str(error.value)


def _no_memory(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_a_copy_that_there_is_no_memory_for_fails_on_all_ranks() -> None:
    told, seen = run_world(TRAINERS, ENGINES, no_room, serve)
    assert all("trainer rank 1 cannot allocate " in message for message in told)
    assert seen == [[1]] * ENGINES


def cancelled(trainer: Any) -> str:
    slow = Slow()
    sender = trainer.sender(slow.send, transport="ipc")
    weights = fsdp(1)
    handle = sender.update_async(weights.items(), weight_version="1")
    if trainer.rank == 0:
        assert slow.begun.wait(30)
        handle.cancel()
        slow.go.set()
    with pytest.raises(Aborted) as error:
        handle.wait(30)
    slow.go.set()
    become(weights, 2)
    sender.update_async(weights.items(), weight_version="2").wait(30)
    return str(error.value)


def test_a_cancelled_update_ends_on_all_ranks_and_the_next_one_succeeds() -> None:
    told, seen = run_world(TRAINERS, ENGINES, cancelled, serve)
    assert all("trainer rank 0 cancelled the update" in message for message in told)
    assert [versions[-1] for versions in seen] == [2] * ENGINES


def handle_of(call: Any) -> UpdateHandle[Any]:
    return UpdateHandle("7", tasks.start("background update", call), lambda _: None)


def test_a_failure_that_an_interrupted_wait_has_not_raised_is_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def fail() -> None:
        go.wait(10)
        raise Mismatch("unseen")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = handle_of(fail)
    monkeypatch.setattr(handle._future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    go.set()
    with pytest.raises(Mismatch, match="unseen"):
        handle.raise_unseen()


@pytest.mark.sweep
def test_the_benchmark_runs() -> None:
    row = async_updates.run(Matrices("small", 20, 64, 32), "ipc", count=2)
    assert row["bit_exact"]
    assert row["shadow_bytes"] * async_updates.TRAINERS == row["bytes"]
