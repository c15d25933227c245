"""Toy weights of which each version differs from the others in one element of a hundred or two, in DTensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support.toy import DRIFTING, checkpoint

HIDDEN = 64


def weights_of(version: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole tensors of a version, from 1."""
    return checkpoint(DRIFTING + version, dtype, HIDDEN)


def sharded(version: int, dtype: torch.dtype) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in weights_of(version, dtype).items()}


def become(weights: dict[str, DTensor], version: int, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.to_local().copy_(sharded(version, dtype)[name].to_local())
