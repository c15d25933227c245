"""Toy weights of which each version differs from the others in one element of a hundred or two, in DTensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support import toy_trainers
from support.toy import DRIFTING, checkpoint

HIDDEN = 64


def weights_of(version: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole tensors of a version, from 1."""
    return checkpoint(DRIFTING + version, dtype, HIDDEN)


def sharded(version: int, dtype: torch.dtype) -> dict[str, DTensor]:
    return dict(toy_trainers.sharded(DRIFTING + version, (dist.get_world_size(),), "fsdp", dtype, HIDDEN))


def become(weights: dict[str, DTensor], version: int, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for name, new in sharded(version, dtype).items():
            weights[name].to_local().copy_(new.to_local())
