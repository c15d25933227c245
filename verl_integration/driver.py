"""In the driver: the metrics of a colocated sync, which verl itself drops, reach verl's logger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.ray_utils import auto_await

from sglang_reshard.verl.hooks import around

_pending: dict[str, float] = {}  # of the last colocated sync, until the next line of the log


def install() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.tracking import Tracking

    # verl's method tells by its caller's frame whether it is awaited, so ours has to be of the same make.
    around(CheckpointEngineManager, "update_weights", _update_weights, dressed=auto_await)
    around(Tracking, "log", _log)


async def _update_weights(stock: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    metrics = await stock(manager, *args, **kwargs)
    if manager.backend == "naive":
        taken = await manager.actor_wg.workers[0].__ray_call__.remote(_take_metrics)
        _pending.clear()
        _pending.update(taken)
        metrics = {**(metrics or {}), **taken}
    return metrics


def _take_metrics(_worker: Any) -> dict[str, float]:
    from sglang_reshard.verl.trainer import take_metrics

    return take_metrics()


def _log(stock: Callable[..., Any], tracking: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    data = {**_pending, **data}
    _pending.clear()
    return stock(tracking, data, *args, **kwargs)
