"""Layouts and copies for the planner's tests, and plans executed in one process on real tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from sglang_reshard.landings.checked.messages import summed
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.landings.checked.source import SourceChecksums
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan import (
    ClusterTopology,
    RankDemand,
    RankLocation,
    ReadPlan,
    TensorIndex,
    plan_reads,
    rank_demand,
)
from sglang_reshard.routes import choose_strategy
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.sources import Mesh, Placement, SourceLayout, SourceTensor, TrainerState
from sglang_reshard.trace.program import Copy
from support import drawn

HOST = "host"


def tensor_parallel(
    trainers: int, shapes: list[tuple[int, ...]], dims: list[int], dtype: str = "bfloat16"
) -> SourceLayout:
    """A layout of tensors sharded along `dims` (-1: replicated) over one mesh dimension."""
    placements = sorted({(Placement(d),) for d in dims}, key=str)
    tensors = tuple(
        SourceTensor(f"t{i}", shape, dtype, 0, placements.index((Placement(d),)))
        for i, (shape, d) in enumerate(zip(shapes, dims, strict=True))
    )
    return SourceLayout(trainers, (Mesh((trainers,), tuple(range(trainers))),), tuple(placements), tensors)


def wanted(layout: SourceLayout, tensor: int, box: Box, offset: int = 0) -> Copy:
    """Returns the copy of a box of a tensor to `offset` of the one target, "live", in row-major order."""
    strides = tuple(math.prod(box.shape[d + 1 :]) for d in range(len(box.start)))
    return Copy(layout.tensors[tensor].name, Region.of(box), "live", offset, strides)


def tp_slice(layout: SourceLayout, tensor: int, dim: int, rank: int, size: int, offset: int = 0) -> Copy | None:
    """A rank's part of a tensor that `size` engine ranks split along `dim` as torch.chunk would; None if empty."""
    shape = layout.tensors[tensor].shape
    if dim < 0:
        return wanted(layout, tensor, Box.whole(shape), offset)
    part = -(-shape[dim] // size)
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = min(rank * part, shape[dim]), min((rank + 1) * part, shape[dim])
    box = Box(tuple(start), tuple(stop))
    return wanted(layout, tensor, box, offset) if box.numel else None


def tp_copies(layout: SourceLayout, dims: list[int], engines: int) -> list[list[Copy]]:
    """For each engine rank, its slices of all tensors, one after the other in its target."""
    found = []
    for rank in range(engines):
        own: list[Copy] = []
        end = 0
        for i, dim in enumerate(dims):
            if copy := tp_slice(layout, i, dim, rank, engines, end):
                own.append(copy)
                end += copy.region.numel
        found.append(own)
    return found


def tensor_parallel_demands(
    trainer_hosts: Sequence[str], engine_hosts: Sequence[str], dims: Sequence[int] = (0, 1, -1)
) -> tuple[TensorIndex, list[RankDemand], ClusterTopology]:
    """What engine ranks without GPUs need of twelve tensors.

    Trainer ranks hold rows, engine ranks parts along `dims`, of every three tensors in turn.
    """
    shapes = [(512, 256), (256, 512), (256,)] * 4
    layout = tensor_parallel(len(trainer_hosts), shapes, [0] * len(shapes))
    index, demands = TensorIndex.of(layout), []
    copies = tp_copies(layout, list(dims) * 4, len(engine_hosts))
    for rank, (own, host) in enumerate(zip(copies, engine_hosts, strict=True)):
        plan = plan_reads(index, own, RankLocation(rank, len(engine_hosts), host, tuple(trainer_hosts)))
        demands.append(rank_demand(index, plan, host))
    return index, demands, ClusterTopology.of(demands, trainer_hosts)


def tensor_parallel_strategy(
    transport: str,
    trainer_hosts: Sequence[str],
    engine_hosts: Sequence[str],
    dims: Sequence[int] = (0, 1, -1),
    bucket_bytes: int = 1 << 20,
) -> Strategy:
    """The strategy for `tensor_parallel_demands`."""
    index, demands, topology = tensor_parallel_demands(trainer_hosts, engine_hosts, dims)
    return choose_strategy(transport, index, demands, topology, bucket_bytes)


def meshed_layouts() -> st.SearchStrategy[SourceLayout]:
    return st.randoms().map(lambda random: drawn.layout_of(random, degenerate=False))


def copies_of(layout: SourceLayout) -> st.SearchStrategy[list[Copy]]:
    return st.randoms().map(lambda random: drawn.copies_of(layout, random))


def values(layout: SourceLayout, seed: int = 1) -> dict[str, torch.Tensor]:
    """Whole tensors by name. Small integers that every dtype holds, hardly ever two alike."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randint(1, 200, t.shape, generator=generator).to(getattr(torch, t.dtype)) for t in layout.tensors
    }


def shards(layout: SourceLayout, whole: dict[str, torch.Tensor], trainer_rank: int) -> list[torch.Tensor]:
    """A trainer rank's local tensors, cut from the whole ones."""
    found = []
    for tensor in layout.tensors:
        held = layout.shard_map(tensor)
        local = torch.zeros(
            held.min_local_shape(trainer_rank) or (0,) * len(tensor.shape), dtype=getattr(torch, tensor.dtype)
        )
        for shard in held.shards:
            if trainer_rank in shard.ranks:
                held.to_local(shard, Region.of(shard.box)).view(local)[...] = whole[tensor.name][shard.box.slices()]
        found.append(local)
    return found


def assembled_states(states: Sequence[TrainerState]) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of a training state, from the shards of all trainer ranks; every replica is read."""
    layout = states[0].layout
    found = {}
    for number, tensor in enumerate(layout.tensors):
        held = layout.shard_map(tensor)
        pieces = [(shard, states[rank].shards[number]) for shard in held.shards for rank in shard.ranks]
        whole = found[tensor.name] = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for shard, local in pieces:
            whole[shard.box.slices()] = held.to_local(shard, Region.of(shard.box)).view(local)
        for shard, local in pieces:
            same = torch.equal(whole[shard.box.slices()], held.to_local(shard, Region.of(shard.box)).view(local))
            assert same, f"holders of {tensor.name}{shard.box} differ"
    return found


def empty_targets(copies: Sequence[Copy]) -> dict[str, torch.Tensor]:
    ends: dict[str, int] = {}
    for c in copies:
        last = c.offset + sum((n - 1) * s for n, s in zip(c.region.count, c.strides, strict=True))
        ends[c.target] = max(ends.get(c.target, 0), last + 1)
    return {name: torch.full((end,), -1.0) for name, end in ends.items()}


def loaded(copies: list[Copy], whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The targets as the copies themselves fill them."""
    targets = empty_targets(copies)
    for copy in copies:
        copy.destination(targets[copy.target]).copy_(whole[copy.source][copy.region.slices()])
    return targets


def run_reads(plan: ReadPlan, local: dict[int, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the targets as a plan's reads fill them from trainer ranks' local tensors."""
    targets = empty_targets(list(plan.copies))
    for copy, part, trainer_rank in zip(plan.copy_ids, plan.item_ids, plan.trainer_ranks, strict=True):
        c, p = plan.copies[copy], plan.items[part]
        shard = local[int(trainer_rank)][plan.tensor_ids[copy]]
        targets[c.target].as_strided(p.local_region.count, c.strides, c.offset + p.offset).copy_(
            p.local_region.view(shard)
        )
    return targets


def read_plans(layout: SourceLayout, copies: list[list[Copy]]) -> tuple[TensorIndex, list[ReadPlan]]:
    """Returns all engine ranks' read plans, on one host."""
    index = TensorIndex.of(layout)
    hosts = (HOST,) * layout.trainer_ranks
    return index, [plan_reads(index, c, RankLocation(rank, len(copies), HOST, hosts)) for rank, c in enumerate(copies)]


def rank_demands(
    layout: SourceLayout, copies: list[list[Copy]], hosts: list[str] | None = None
) -> tuple[TensorIndex, list[Any]]:
    """Returns all engine ranks' demands; `hosts` are theirs."""
    index, plan = read_plans(layout, copies)
    return index, [rank_demand(index, t, hosts[e] if hosts else HOST) for e, t in enumerate(plan)]


def expected_of(sources: Sequence[SourceChecksums], selection: Selection) -> np.ndarray:
    """The checksums that engine ranks must have, by all trainer ranks' parts: uint64 [engine ranks, groups]."""
    parts = [source.compute(selection) for source in sources]
    return np.stack([found.values for found in summed(parts, len(sources[0]._of_engine_rank))])
