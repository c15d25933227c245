"""SGLang's own path: `weight_sync.update_weights`, called as its docstring says, on every trainer rank.

It takes for granted that as many trainer ranks as the engine has ranks hold the model together. With more of
them, each such group has a part in it as it would have with an engine of its own. With fewer it cannot be
called, and what is left is `Engine.update_weights_from_tensor` with whole tensors.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

_MESH_KEY = "tp"


class StockPath:
    """One trainer rank's end. `engine` is None on all but the first; every rank makes one, in step."""

    def __init__(self, engine: Any, engine_tp: int) -> None:
        from sglang.srt.weight_sync.utils import update_weights

        self._engine, self._update_weights = engine, update_weights
        trainers = dist.get_world_size()
        self._mesh = None
        if trainers % engine_tp == 0:
            self._mesh = init_device_mesh(
                "cpu", (trainers // engine_tp, engine_tp), mesh_dim_names=("replica", _MESH_KEY)
            )

    def update(self, named: list[tuple[str, DTensor]]) -> None:
        if self._mesh is None:
            self._update_whole(named)
            return
        target = _Awaitable(self._engine) if self._engine is not None else _NoEngine()
        work = self._update_weights(target, named, _MESH_KEY, self._mesh)
        if self._engine is None:
            asyncio.run(work)
        else:
            _check(self._engine.loop.run_until_complete(work))
        dist.barrier()  # the tensors must live until the engine has read them

    def _update_whole(self, named: list[tuple[str, DTensor]]) -> None:
        with torch.no_grad():
            whole = [(name, tensor.full_tensor()) for name, tensor in named]
        if self._engine is not None:
            _check(self._engine.update_weights_from_tensor(whole))
        dist.barrier()

    def close(self) -> None:
        """Nothing is kept."""


class _Awaitable:
    """What `update_weights` calls an engine: one with a coroutine that takes the request."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def update_weights_from_tensor(self, request: Any) -> Any:
        return await self._engine.tokenizer_manager.update_weights_from_tensor(request, None)


class _NoEngine:
    """Of a group of trainer ranks whose engine is not part of this benchmark."""

    async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        return True, ""


def _check(answer: Any) -> None:
    loaded, *why = answer
    if not loaded:
        raise RuntimeError(f"stock refused the update: {why}")
