"""Trainer states of the toy model, and the pairs of trainer and engine that it is tried with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sglang_reshard.observability.report import UpdateReport
from support.reports import of_others
from support.toy import HIDDEN, checkpoint
from support.toy_fused import STACKED, fused, stacked

# The trainer's mesh, the engine's ranks, and how the trainer holds its tensors.
PAIRS = [
    ((4,), 16, "tp"),
    ((4,), 2, "tp"),
    ((3,), 2, "tp"),
    ((3,), 4, "fsdp"),
    ((2, 2), 4, "fsdp_tp"),
    ((2,), 4, "plain"),
    ((1,), 1, "tp"),
    ((2,), 4, "stacked"),
    ((2, 2), 2, "stacked"),
    ((2,), 4, "fused"),
    ((2, 2), 2, "fused"),
]


def sharded(
    version: int, mesh_shape: tuple[int, ...], kind: str, dtype: torch.dtype, hidden: int = HIDDEN
) -> Iterator[Any]:
    """A training state on a mesh, as `describe` takes it.

    kind  "tp", "fsdp" (everything Shard(0)), "fsdp_tp" (FSDP2 over TP), "plain"; "stacked" is "fsdp" with a stack, on
          its columns where the mesh has two dimensions; "fused", see `support.toy_fused`
    """
    whole = checkpoint(version, dtype, hidden)
    if kind == "plain":
        yield from whole.items()
        return
    if kind == "fused":
        yield from fused(whole, mesh_shape[-1], dist.get_world_size(), dist.get_rank())
        return
    mesh = init_device_mesh("cpu", mesh_shape)
    if kind == "stacked":
        stack, parts = stacked(whole)
        placements = [Shard(0)] if len(mesh_shape) == 1 else [Shard(0), Shard(2)]
        yield "stack", distribute_tensor(stack, mesh, placements, src_data_rank=None), parts
        whole = {name: tensor for name, tensor in whole.items() if name not in STACKED}
    for name, tensor in whole.items():
        tp = {"down.weight": Shard(1), "norm.weight": Replicate()}.get(name, Shard(0))
        placements = [tp] if kind == "tp" else [Shard(0), *[Replicate()] * (len(mesh_shape) - 1)]
        if kind == "fsdp_tp":
            placements = [_StridedShard(0, split_factor=mesh_shape[1]) if tp == Shard(0) else Shard(0), tp]
        yield name, distribute_tensor(tensor, mesh, placements, src_data_rank=None)


class State:
    """A training state that is written in place, as an optimizer writes."""

    def __init__(self, mesh_shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
        self._how = mesh_shape, kind, dtype
        self.given = list(sharded(0, *self._how))

    def become(self, version: int) -> None:
        for (_, old, *_), (_, new, *_) in zip(self.given, sharded(version, *self._how), strict=True):
            getattr(old, "_local_tensor", old).copy_(getattr(new, "_local_tensor", new))


def assert_told_alike(of_trainer_ranks: list[list[UpdateReport]]) -> None:
    """Asserts that all trainer ranks have the reports of trainer rank 0, which alone has bytes by trainer rank."""
    first, *others = of_trainer_ranks
    for report in first:
        read = [sum(engine_rank.read_bytes.get(rank.rank, 0) for engine_rank in report.engine_ranks)
                for rank in report.trainer_ranks]  # fmt: skip
        assert read == [rank.sent_bytes for rank in report.trainer_ranks]
    short = [of_others(json.loads(report.json())) for report in first]
    told = [[json.loads(report.json()) for report in reports] for reports in others]
    assert told == [short] * len(others), "trainer ranks were told different things"
