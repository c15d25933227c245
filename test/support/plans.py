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
from sglang_reshard.layout.source_layout import EXPLICIT, compute_shard_map
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
from sglang_reshard.sources import Mesh, Placement, ShardMap, SourceLayout, SourceTensor, TrainerState
from sglang_reshard.sources.flat import flat_shard_map
from sglang_reshard.trace.program import Copy

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


@st.composite
def meshed_layouts(draw: Any) -> SourceLayout:
    """Tensors on meshes of one or two dimensions: sharded, replicated, strided as by FSDP2 over TP, uneven, empty.

    Some have an explicit sharding, and local tensors that are larger than their shards.
    """
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    trainers = math.prod(mesh_shape)
    meshes = [Mesh(mesh_shape, tuple(range(trainers)))]
    if len(mesh_shape) == 2 and draw(st.booleans()):  # the same ranks, walked the other way
        meshes.append(Mesh(mesh_shape[::-1], tuple(draw(st.permutations(range(trainers))))))
    placements: dict[tuple[Placement, ...], int] = {}
    explicit: dict[ShardMap, int] = {}
    tensors = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        mesh = draw(st.integers(0, len(meshes) - 1))
        dims = [draw(st.integers(-1, len(shape) - 1)) for _ in mesh_shape]
        placed = tuple(Placement(d) for d in dims)
        if len(dims) == 2 and dims[0] == dims[1] >= 0 and draw(st.booleans()):
            placed = Placement(dims[0], meshes[mesh].shape[1]), placed[1]
        dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
        kind = draw(st.integers(0, 5))
        if kind == 2:
            held = draw(flat_maps(shape, trainers))
            where = EXPLICIT, explicit.setdefault(held, len(explicit))
        elif kind < 2:
            where = (
                EXPLICIT,
                explicit.setdefault(draw(moved(compute_shard_map(shape, meshes[mesh], placed))), len(explicit)),
            )
        else:
            where = mesh, placements.setdefault(placed, len(placements))
        tensors.append(SourceTensor(f"t{i}", shape, dtype, *where))
    return SourceLayout(trainers, tuple(meshes), tuple(placements), tuple(tensors), tuple(explicit))


@st.composite
def flat_maps(draw: Any, shape: tuple[int, ...], trainers: int) -> ShardMap:
    """A tensor in a flat buffer that the trainer ranks share, cut anywhere; some ranks may have nothing."""
    numel = math.prod(shape)
    cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=trainers - 1, max_size=trainers - 1)))
    ranks = draw(st.permutations(range(trainers)))
    return flat_shard_map(shape, tuple(zip(ranks, [0, *cuts], [*cuts, numel], strict=True)))


@st.composite
def moved(draw: Any, held: ShardMap) -> ShardMap:
    """The same shards, at another start of each trainer rank's local tensor."""
    ranks = sorted({rank for shard in held.shards for rank in shard.ranks})
    dims = len(held.shards[0].local_start) if held.shards else 0
    by = {rank: tuple(draw(st.integers(0, 2)) for _ in range(dims)) for rank in ranks}
    own = [(shard, rank) for shard in held.shards for rank in shard.ranks]
    return ShardMap.of(
        (p.box, tuple(a + b for a, b in zip(p.local_start, by[rank], strict=True)), rank) for p, rank in own
    )


@st.composite
def copies_of(draw: Any, layout: SourceLayout) -> list[Copy]:
    """What some engine rank's loader might copy: strided regions, transposed, of any tensors, some of them twice."""
    found: list[Copy] = []
    ends = {"a": 0, "b": 0}
    for tensor in layout.tensors:
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
            start, count, step = [], [], []
            for length in tensor.shape:
                s = draw(st.integers(1, 3))
                a = draw(st.integers(0, length - 1))
                start.append(a)
                step.append(s)
                count.append(draw(st.integers(1, (length - 1 - a) // s + 1)))
            region = Region(tuple(start), tuple(count), tuple(step))
            target = draw(st.sampled_from(sorted(ends)))
            order = draw(st.permutations(range(len(count))))
            strides = [0] * len(count)
            stride = 1
            for d in order:
                strides[d], stride = stride, stride * count[d]
            found.append(Copy(tensor.name, region, target, ends[target], tuple(strides)))
            ends[target] += region.numel
            if draw(st.integers(0, 5)) == 0:  # the very same elements once more, elsewhere
                found.append(Copy(tensor.name, region, target, ends[target], tuple(strides)))
                ends[target] += region.numel
    return found


def values(layout: SourceLayout) -> dict[str, torch.Tensor]:
    """Whole tensors by name. Small integers that every dtype holds, hardly ever two alike."""
    generator = torch.Generator().manual_seed(1)
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
            assert torch.equal(whole[shard.box.slices()], held.to_local(shard, Region.of(shard.box)).view(local))
    return found


def empty_targets(copies: list[Copy]) -> dict[str, torch.Tensor]:
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


def read_plans(
    layout: SourceLayout, copies: list[list[Copy]], hosts: tuple[str, ...] | None = None
) -> tuple[TensorIndex, list[ReadPlan]]:
    """Returns all engine ranks' read plans, on one host unless `hosts` (of the trainer ranks) says otherwise."""
    index = TensorIndex.of(layout)
    hosts = hosts or (HOST,) * layout.trainer_ranks
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
