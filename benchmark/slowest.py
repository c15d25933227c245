"""Times a call on all trainer ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def slowest(call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns what a call returns, and the seconds that it takes on the slowest trainer rank. Collective."""
    dist.barrier()
    started = time.perf_counter()
    returned = call()
    mine = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return returned, float(mine)
