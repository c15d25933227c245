"""The metrics of a sync, out of the reports of the engines that took part."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sglang_reshard.observability.report import RankReport, TrainerRankReport, UpdateReport
from sglang_reshard.verl import driver_hooks
from sglang_reshard.verl.metrics import sync_metrics, transport_reasons
from sglang_reshard.verl.settings import BACKEND


def report(transport: str, received: int, move: float) -> UpdateReport:
    return UpdateReport(
        success=True,
        message="",
        weight_version=None,
        transport=transport,
        transport_reason="requested",
        bucket_bytes=1,
        seconds={"move": move},
        engine_ranks=(RankReport(0, received, received, 7, {"move": move}),),
        trainer_ranks=(TrainerRankReport(0, 100, received), TrainerRankReport(1, 100, 0)),
    )


def test_other_trainer_ranks_have_no_rows_and_one_metric_less() -> None:
    short = msgspec.structs.replace(report("ipc", 1_000, 0.25), trainer_ranks=())
    metrics = sync_metrics({"a": report("ipc", 1_000, 0.25)}, 2.0)
    assert metrics.pop("reshard/sent_bytes_rank0") == 1_000.0
    assert sync_metrics({"a": short}, 2.0) == metrics


def test_the_slowest_and_the_largest_count() -> None:
    reports = {"a": report("ipc", 1_000, 0.25), "b": report("p2p", 4_000, 0.5)}
    assert sync_metrics(reports, 2.0) == {
        "reshard/seconds": 2.0,
        "reshard/bytes_per_rank": 4_000.0,
        "reshard/gb_per_s": 2e-6,
        "reshard/peak_extra_bytes": 7.0,
        "reshard/sent_bytes_rank0": 5_000.0,
        "reshard/seconds/move": 0.5,
        "reshard/transport/ipc": 1.0,
        "reshard/transport/p2p": 1.0,
    }
    assert transport_reasons(reports) == "a: ipc: requested; b: p2p: requested"
    assert transport_reasons({"a": reports["a"], "c": reports["a"]}) == "a, c: ipc: requested"


class Replicas:
    """A manager of replicas, whose next sync has these metrics."""

    backend, replicas, metrics = BACKEND, (), {}

    async def sync(self, *_: Any, **__: Any) -> dict[str, float]:
        return dict(self.metrics)


def test_each_step_is_logged_with_its_own_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 0 is synced and not logged, where verl does not validate before it trains."""
    monkeypatch.setattr(driver_hooks, "_pending", {})
    monkeypatch.setattr(driver_hooks, "_step", None)
    logged: dict[int, dict[str, float]] = {}
    replicas, others = Replicas(), Replicas()

    def sync(of: Replicas, step: int | None, **metrics: float) -> None:
        of.metrics = {f"reshard/{name}": value for name, value in metrics.items()}
        asyncio.run(driver_hooks._update_weights(Replicas.sync, of, *([] if step is None else [step])))

    def log(step: int, **data: float) -> None:
        driver_hooks._log(lambda _tracking, data, step: logged.update({step: data}), None, data, step=step)

    sync(replicas, 0, seconds=9.0, planning=7.0)
    sync(replicas, 1, seconds=1.0)
    log(1, loss=0.5)
    log(2)  # no sync
    sync(replicas, 3, seconds=3.0)
    sync(others, 3, bytes=8.0)
    log(2, late=1.0)
    log(3)
    log(4)
    sync(replicas, None, seconds=5.0)
    log(5)
    assert logged == {
        1: {"reshard/seconds": 1.0, "loss": 0.5},
        2: {"late": 1.0},
        3: {"reshard/seconds": 3.0, "reshard/bytes": 8.0},
        4: {},
        5: {"reshard/seconds": 5.0},
    }
