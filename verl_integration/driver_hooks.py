"""Hooks verl's driver.

It refuses syncs that cannot take place, logs the metrics of colocated ones, which verl drops, lets replicas that are
added take the weights of those that are there, and adds metrics to verl's comparison of rollout and actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.ray_utils import auto_await

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import rollout_difference
from sglang_reshard.verl.hooks import around
from sglang_reshard.verl.replica_weights import pull_weights
from sglang_reshard.verl.settings import BACKEND

_pending: dict[str, float] = {}  # of the last colocated sync, until the next call of `Tracking.log`


def install() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.tracking import Tracking

    # verl's method inspects its caller's frame to find out if it is awaited, so the wrapper needs the same decorator.
    around(CheckpointEngineManager, "update_weights", _update_weights, decorator=auto_await)
    around(CheckpointEngineManager, "add_replicas", _add_replicas)
    around(Tracking, "log", _log)
    rollout_difference.install()


async def _update_weights(stock: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    _check_replicas(manager)
    metrics = await stock(manager, *args, **kwargs)
    if manager.backend == "naive":
        sync_metrics = await manager.actor_wg.workers[0].__ray_call__.remote(_take_metrics)
        _pending.clear()
        _pending.update(sync_metrics)
        metrics = {**(metrics or {}), **sync_metrics}
    return metrics


def _check_replicas(manager: Any) -> None:
    """Raises Unsupported for hybrid replicas of a manager whose backend is for standalone ones.

    The trainer's workers are theirs, too. They would send, and nobody would say where the replica's server is.
    """
    from verl.workers.rollout.replica import RolloutMode

    hybrid = [replica for replica in manager.replicas if replica.rollout_mode == RolloutMode.HYBRID]
    if manager.backend == BACKEND and hybrid:
        raise Unsupported(
            f"{len(hybrid)} of the {len(manager.replicas)} replicas are hybrid (they share their workers with the "
            f"trainer), but their CheckpointEngineManager has backend={BACKEND!r}, which is for standalone replicas. "
            "Give it a copy of the configuration with backend='naive', as verl's own trainers do; "
            f"rollout.checkpoint_engine.backend={BACKEND} stays as it is and selects this package for the sync"
        )


def _add_replicas(stock: Callable[..., Any], manager: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives new replicas the weights that the others have: they can serve before the next sync."""
    known = [] if manager.backend != BACKEND else list(manager.replicas)
    result = stock(manager, replicas, *args, **kwargs)
    if known:
        pull_weights([_url(replica) for replica in known], [_url(replica) for replica in replicas])
    return result


def _url(replica: Any) -> str:
    return f"http://{replica.server_address}"


def _take_metrics(_worker: Any) -> dict[str, float]:
    from sglang_reshard.verl.replica_sender import take_metrics

    return take_metrics()


def _log(stock: Callable[..., Any], tracking: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    data = {**_pending, **data}
    _pending.clear()
    return stock(tracking, data, *args, **kwargs)
