"""SGLang's `ServerAdapter` in verl: `update_weights` takes a training engine's shards instead of gathered tensors.

    a hybrid worker   trainer ranks reshard into the servers of all replicas; trainer rank 0 asks each server once
    a rollout worker  of a standalone replica: says where its server is, and waits for how the sync ended

What is not carried goes the way that verl itself would go, and a warning says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.trainer.collectives import broadcast_message, gather_messages
from sglang_reshard.verl.export import not_carried
from sglang_reshard.verl.hooks import around
from sglang_reshard.verl.meeting import Arrival
from sglang_reshard.verl.settings import BACKEND, Settings
from sglang_reshard.verl.trainer import TrainerRank, world
from sglang_reshard.verl.weights import engine_of

logger = logging.getLogger(__name__)
STOCK_MODULE = "verl.workers.rollout.sglang_rollout.sglang_rollout"
_COLOCATED = "_sglang_reshard_colocated"
Stock = Callable[..., Awaitable[Any]]


class _Server(msgspec.Struct, frozen=True):
    """The server that a worker leads; no URL if it leads none."""

    url: str = ""


def install() -> None:
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    around(ServerAdapter, "update_weights", _update_weights)


async def _update_weights(
    stock: Stock,
    adapter: Any,
    weights: Any,
    global_steps: int | None = None,
    **kwargs: Any,
) -> Any:
    if isinstance(weights, Arrival):
        return await _arrive(adapter, weights, global_steps)
    # A checkpoint engine's worker says in which form its weights come; a hybrid worker, which has the engine, does not.
    if "wire_format" not in kwargs and adapter.config.checkpoint_engine.backend == BACKEND:
        engine = engine_of(weights)
        reason = not_carried(engine, adapter, kwargs.get("peft_config"))
        if not reason:
            return await _reshard(adapter, engine, global_steps)
        _say_once(adapter, f"reshard: {reason}; this sync takes verl's own path, which gathers every tensor")
    return await stock(adapter, weights, global_steps=global_steps, **kwargs)


async def _arrive(adapter: Any, arrival: Arrival, global_steps: int | None) -> None:
    await adapter._init_server_adapter()
    if not arrival.leads:
        return
    arrival.meeting.say_url(arrival.replica, adapter._engine.server_args.url())
    await asyncio.to_thread(arrival.meeting.await_outcome, arrival.sync, arrival.replica)
    await _set_global_steps(adapter, global_steps)


async def _reshard(adapter: Any, engine: Any, global_steps: int | None) -> dict[str, float]:
    await adapter._init_server_adapter()
    trainer = getattr(adapter, _COLOCATED, None)
    if trainer is None:
        trainer = _colocated(adapter)
        setattr(adapter, _COLOCATED, trainer)
    metrics = trainer.update(engine, global_steps)
    if adapter._engine is not None and adapter._is_server_tp_leader():
        await _set_global_steps(adapter, global_steps)
    return metrics


def _colocated(adapter: Any) -> TrainerRank:
    """Sessions with the servers of all hybrid replicas. Collective over the trainer ranks."""
    settings = Settings.of_rollout(adapter.config.checkpoint_engine)
    trainer = TrainerRank(settings)
    url = adapter._engine.server_args.url() if adapter._engine is not None else ""
    servers = gather_messages(_Server(url), _Server, world())
    address = broadcast_message(trainer.host(), Address, world())
    urls = dict.fromkeys(server.url for server in servers if server.url)
    engines = (RemoteEngine(url, timeout_s=settings.timeout) if trainer.rank == 0 else None for url in urls)
    sends = {url: e.update_weights_distributed if e else None for url, e in zip(urls, engines, strict=True)}
    trainer.attend(address, sends)
    return trainer


async def _set_global_steps(adapter: Any, global_steps: int | None) -> None:
    if global_steps is not None:
        await adapter.server_actor.set_global_steps.remote(global_steps)


def _say_once(adapter: Any, what: str) -> None:
    if getattr(adapter, "_sglang_reshard_said", "") != what:
        adapter._sglang_reshard_said = what
        logger.warning("%s", what)
