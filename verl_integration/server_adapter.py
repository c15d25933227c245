"""Hooks verl's SGLang `ServerAdapter`: `update_weights` uses a training engine's shards instead of gathered tensors.

Trainer ranks update the servers of all hybrid replicas; trainer rank 0 sends each server one request. Weights that are
not supported are synced by verl's own method, and a warning is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from sglang_reshard.control import Address
from sglang_reshard.trainer.collectives import broadcast_message, gather_messages
from sglang_reshard.verl.engine_shards import unsupported_reason
from sglang_reshard.verl.hooks import around
from sglang_reshard.verl.replica_sender import ReplicaSender, world
from sglang_reshard.verl.settings import BACKEND, Settings
from sglang_reshard.verl.training_engine_weights import engine_of

logger = logging.getLogger(__name__)
STOCK_MODULE = "verl.workers.rollout.sglang_rollout.sglang_rollout"
_SENDER = "_sglang_reshard_sender"  # on the adapter
_WARNED = "_sglang_reshard_warned"
Stock = Callable[..., Awaitable[Any]]


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
    if weights is None:  # of a standalone replica's `receive_weights`
        return None
    # A checkpoint engine's worker passes the wire format of its weights; a hybrid worker has the engine, and does not.
    if "wire_format" not in kwargs and adapter.config.checkpoint_engine.backend == BACKEND:
        engine = engine_of(weights)
        peft_config = kwargs.get("peft_config")
        reason = unsupported_reason(engine, adapter, peft_config)
        if not reason:
            only_adapter = peft_config is not None and kwargs.get("base_sync_done", False)
            return await _reshard(adapter, engine, global_steps, only_adapter)
        _warn_once(adapter, f"reshard: {reason}; this sync uses verl's own method, which gathers every tensor")
    return await stock(adapter, weights, global_steps=global_steps, **kwargs)


async def _reshard(adapter: Any, engine: Any, global_steps: int | None, only_adapter: bool) -> dict[str, float]:
    """`only_adapter`: the tensors of the LoRA adapter, and not the weights that it adapts."""
    await adapter._init_server_adapter()
    if not hasattr(adapter, _SENDER):
        setattr(adapter, _SENDER, _colocated_sender(adapter))
    sender: ReplicaSender = getattr(adapter, _SENDER)
    metrics = sender.update_adapter(engine, global_steps) if only_adapter else sender.update(engine, global_steps)
    if adapter._engine is not None and adapter._is_server_tp_leader() and sender.global_steps is not None:
        await adapter.server_actor.set_global_steps.remote(sender.global_steps)
    return metrics


def _colocated_sender(adapter: Any) -> ReplicaSender:
    """Opens sessions with the servers of all hybrid replicas. Collective over the trainer ranks."""
    given = Settings.of_rollout(adapter.config.checkpoint_engine)
    settings = replace(given, relay=False, asynchronous=False, on_failure="raise")  # these are for standalone replicas
    sender = ReplicaSender(settings)
    own = adapter._engine.server_args.url() if adapter._engine is not None else ""  # of a server's first worker
    urls = list(dict.fromkeys(filter(None, gather_messages(own, str, world()))))
    address = broadcast_message(sender.host(), Address, world())
    sender.set_replicas(address, {url: url for url in urls})
    return sender


def _warn_once(adapter: Any, message: str) -> None:
    if getattr(adapter, _WARNED, "") != message:
        setattr(adapter, _WARNED, message)
        logger.warning("%s", message)
