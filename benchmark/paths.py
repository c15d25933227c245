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

    def update(self, named: list[tuple[str, DTensor]], /) -> UpdateReport | None: ...

    def close(self) -> None: ...


def make(path: str, engine: Any, engine_tp: int) -> UpdatePath:
    """`engine` is None on all trainer ranks but the first."""
    if path == STOCK:
        return StockPath(engine, engine_tp)
    send = engine.update_weights_distributed if engine is not None else None
    assert dist.group.WORLD is not None
    return WeightSender.over(dist.group.WORLD, send, transport=path)
