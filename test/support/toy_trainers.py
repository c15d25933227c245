"""Trainer states of the toy model, and the pairs of trainer and engine that it is tried with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from support.toy import checkpoint

# The trainer's mesh, the engine's ranks, and how the trainer holds its tensors.
PAIRS = [
    ((4,), 16, "tp"),
    ((4,), 2, "tp"),
    ((3,), 2, "tp"),
    ((3,), 4, "fsdp"),
    ((2, 2), 4, "fsdp_tp"),
    ((2,), 4, "plain"),
    ((1,), 1, "tp"),
]


def sharded(version: int, mesh_shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Iterator[Any]:
    """A training state on a mesh: "tp", "fsdp" (everything Shard(0)), "fsdp_tp" (FSDP2 over TP) or "plain"."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for name, tensor in checkpoint(version, dtype).items():
        if kind == "plain":
            yield name, tensor
            continue
        tp = {"down.weight": Shard(1), "norm.weight": Replicate()}.get(name, Shard(0))
        placements = {"tp": [tp], "fsdp": [Shard(0)]}.get(kind)
        if kind == "fsdp_tp":
            placements = [_StridedShard(0, split_factor=mesh_shape[1]) if tp == Shard(0) else Shard(0), tp]
        yield name, distribute_tensor(tensor, mesh, placements, src_data_rank=None)
