"""What every path is to the benchmark, and ours."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmark.cases import STOCK
from benchmark.stock import StockPath
from sglang_reshard import WeightSender
from sglang_reshard.observability.report import UpdateReport


class UpdatePath(Protocol):
    """Brings the engine to a trainer's weights; every trainer rank calls its methods in step."""

    def update(self, named: list[tuple[str, DTensor]]) -> UpdateReport | None: ...

    def close(self) -> None: ...


class ReshardPath:
    """`WeightSender` with one transport. `engine` is None on all trainer ranks but the first."""

    def __init__(self, engine: Any, transport: str, **options: Any) -> None:
        """options: of every update"""
        send = engine.update_weights_distributed if engine is not None else None
        assert dist.group.WORLD is not None
        self._sender = WeightSender.over(dist.group.WORLD, send, transport=transport)
        self._options = options

    def update(self, named: list[tuple[str, DTensor]]) -> UpdateReport:
        return self._sender.update(named, **self._options)

    def close(self) -> None:
        self._sender.close()


def make(path: str, engine: Any, engine_tp: int) -> UpdatePath:
    return StockPath(engine, engine_tp) if path == STOCK else ReshardPath(engine, path)
