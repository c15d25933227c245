"""Hooks verl's driver.

It syncs hybrid replicas as colocated ones, refuses syncs that cannot take place, tells where standalone replicas are,
logs the metrics of syncs, which some of verl's trainers drop, lets replicas that are added take the weights of those
that are there, and adds metrics to verl's comparison of rollout and actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.utils.ray_utils import auto_await

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import rollout_difference
from sglang_reshard.verl.checkpoint_engine import manager_replicas, server_url
from sglang_reshard.verl.hooks import around
from sglang_reshard.verl.replica_sender import take_metrics
from sglang_reshard.verl.replica_weights import pull_weights
from sglang_reshard.verl.settings import BACKEND

_COLOCATED = "naive"  # verl's name of the sync by `ServerAdapter.update_weights`, which reshards
_pending: dict[str, float] = {}  # of the syncs of one step, of both kinds of replicas, until verl logs that step
_step: int | None = None  # that step; None if the sync was given none


def install() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.tracking import Tracking

    # verl's method inspects its caller's frame to find out if it is awaited, so the wrapper needs the same decorator.
    around(CheckpointEngineManager, "update_weights", _update_weights, decorator=auto_await)
    around(CheckpointEngineManager, "build_process_group", _build_process_group)
    around(CheckpointEngineManager, "add_replicas", _add_replicas)
    around(Tracking, "log", _log)
    rollout_difference.install()


async def _update_weights(stock: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    _settle_backend(manager)
    metrics = await stock(manager, *args, **kwargs)
    if manager.backend == _COLOCATED:
        metrics = {**(metrics or {}), **await manager.actor_wg.workers[0].__ray_call__.remote(take_metrics)}
    elif manager.backend != BACKEND:
        return metrics
    _keep(metrics, args[0] if args else kwargs.get("global_steps"))
    return metrics


def _keep(metrics: dict[str, float], step: int | None) -> None:
    """Keeps the metrics for the log of this step. Another step's have phases that this one's sync may not have."""
    global _step
    if step != _step:
        _pending.clear()
    _step = step
    _pending.update(metrics)


def _settle_backend(manager: Any) -> None:
    """Gives a manager of hybrid replicas the backend of a colocated sync, as verl's v1 trainers do.

    Its workers are the trainer's, too: with the backend of standalone replicas they would send, and nobody would say
    where the replica's server is. Raises Unsupported if other replicas are standalone.
    """
    from verl.workers.rollout.replica import RolloutMode

    hybrid = [replica for replica in manager.replicas if replica.rollout_mode == RolloutMode.HYBRID]
    if manager.backend != BACKEND or not hybrid:
        return
    if len(hybrid) < len(manager.replicas):
        raise Unsupported(
            f"{len(hybrid)} of the {len(manager.replicas)} replicas are hybrid (they share their workers with the "
            "trainer), and the others are standalone. One CheckpointEngineManager cannot sync both: make one of each"
        )
    manager.backend = _COLOCATED


def _build_process_group(stock: Callable[..., Any], manager: Any, rollout: Any) -> Any:
    """Lets `build_topology`, which verl calls with the workers' answers alone, know the replicas."""
    token = manager_replicas.set(manager.replicas)
    try:
        return stock(manager, rollout)
    finally:
        manager_replicas.reset(token)


def _add_replicas(stock: Callable[..., Any], manager: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives new replicas the weights that the others have: they can serve before the next sync."""
    known = [] if manager.backend != BACKEND else list(manager.replicas)
    result = stock(manager, replicas, *args, **kwargs)
    if known:
        pull_weights(list(map(server_url, known)), list(map(server_url, replicas)))
    return result


def _log(stock: Callable[..., Any], tracking: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if _step is None or _step == (args[0] if args else kwargs["step"]):
        data = {**_pending, **data}
        _pending.clear()
    return stock(tracking, data, *args, **kwargs)
