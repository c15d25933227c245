"""Passes the metrics of a colocated sync, which verl itself drops, to verl's logger in the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.ray_utils import auto_await

from sglang_reshard.verl.hooks import around

_pending: dict[str, float] = {}  # of the last colocated sync, until the next call of `Tracking.log`


def install() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.tracking import Tracking

    # verl's method inspects its caller's frame to find out if it is awaited, so the wrapper needs the same decorator.
    around(CheckpointEngineManager, "update_weights", _update_weights, decorator=auto_await)
    around(Tracking, "log", _log)


async def _update_weights(stock: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    metrics = await stock(manager, *args, **kwargs)
    if manager.backend == "naive":
        sync_metrics = await manager.actor_wg.workers[0].__ray_call__.remote(_take_metrics)
        _pending.clear()
        _pending.update(sync_metrics)
        metrics = {**(metrics or {}), **sync_metrics}
    return metrics


def _take_metrics(_worker: Any) -> dict[str, float]:
    from sglang_reshard.verl.replica_sender import take_metrics

    return take_metrics()


def _log(stock: Callable[..., Any], tracking: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    data = {**_pending, **data}
    _pending.clear()
    return stock(tracking, data, *args, **kwargs)
