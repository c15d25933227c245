"""Layouts of trainers and what engine ranks copy of them, drawn from a `Random`, or from hypothesis's."""

from __future__ import annotations

import math
from random import Random

from sglang_reshard.layout.regions import Region
from sglang_reshard.layout.source_layout import EXPLICIT, compute_shard_map
from sglang_reshard.sources import Mesh, Placement, ShardMap, SourceLayout, SourceTensor
from sglang_reshard.sources.flat import flat_shard_map
from sglang_reshard.trace.program import Copy

DTYPES = ("float32", "bfloat16", "uint8", "int64")


def layout_of(random: Random, degenerate: bool = True) -> SourceLayout:
    """Tensors on meshes of one or two dimensions: sharded, replicated, strided, uneven, stated.

    degenerate  scalars and tensors without elements are among them
    """
    mesh_shape = tuple(random.randint(1, 4) for _ in range(random.randint(1, 2)))
    trainers = math.prod(mesh_shape)
    meshes = [Mesh(mesh_shape, tuple(range(trainers)))]
    if len(mesh_shape) == 2:  # the same ranks, walked another way
        meshes.append(Mesh(mesh_shape[::-1], tuple(random.sample(range(trainers), trainers))))
    placements: dict[tuple[Placement, ...], int] = {}
    explicit: dict[ShardMap, int] = {}
    tensors = []
    for i in range(random.randint(1, 4)):
        lengths = range(random.choice((0, 1, 2, 2, 3) if degenerate else (1, 2, 2, 3)))
        shape = tuple(random.randint(0 if degenerate and random.random() < 0.05 else 1, 8) for _ in lengths)
        mesh = random.randrange(len(meshes))
        dims = [random.randint(-1, len(shape) - 1) for _ in mesh_shape]
        placed = tuple(map(Placement, dims))
        if len(dims) == 2 and dims[0] == dims[1] >= 0 and random.random() < 0.5:
            placed = Placement(dims[0], meshes[mesh].shape[1]), placed[1]
        where = mesh, placements.setdefault(placed, len(placements))
        kind = random.random()
        if kind < 0.15:
            cuts = sorted(random.randint(0, math.prod(shape)) for _ in range(trainers - 1))
            held = flat_shard_map(
                shape, tuple(zip(range(trainers), [0, *cuts], [*cuts, math.prod(shape)], strict=True))
            )
            where = EXPLICIT, explicit.setdefault(held, len(explicit))
        elif kind < 0.4:
            held = _moved(compute_shard_map(shape, meshes[mesh], placed), random)
            where = EXPLICIT, explicit.setdefault(held, len(explicit))
        tensors.append(SourceTensor(f"t{i}", shape, random.choice(DTYPES), *where))
    return SourceLayout(trainers, tuple(meshes), tuple(placements), tuple(tensors), tuple(explicit))


def _moved(held: ShardMap, random: Random) -> ShardMap:
    """The same, where each trainer rank's local tensor has something else before it."""
    dims = len(held.shards[0].local_start) if held.shards else 0
    by = {r: tuple(random.randint(0, 2) for _ in range(dims)) for shard in held.shards for r in shard.ranks}
    own = [(shard, rank) for shard in held.shards for rank in shard.ranks]
    return ShardMap.of(
        (p.box, tuple(a + b for a, b in zip(p.local_start, by[rank], strict=True)), rank) for p, rank in own
    )


def copies_of(layout: SourceLayout, random: Random) -> list[Copy]:
    """What some engine rank's loader might copy: strided regions, transposed, with gaps, some of them twice."""
    found: list[Copy] = []
    ends = {"a": 0, "b": 0}
    for tensor in layout.tensors:
        if not tensor.spec.numel:
            continue
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            region = _region(tensor.shape, random)
            strides, stride = [0] * len(region.count), random.choice((1, 1, 1, 2))
            for d in random.sample(range(len(strides)), len(strides)):
                strides[d], stride = stride, stride * region.count[d]
            for _ in range(2 if random.random() < 0.15 else 1):
                target = random.choice(sorted(ends))
                found.append(Copy(tensor.name, region, target, ends[target], tuple(strides)))
                ends[target] += stride + random.randrange(2)
    return found


def _region(shape: tuple[int, ...], random: Random) -> Region:
    start, count, step = [], [], []
    for length in shape:
        step.append(s := random.choice((1, 1, 1, 2, 3)))
        start.append(a := random.choice((0, random.randrange(length))))
        most = (length - 1 - a) // s + 1
        count.append(random.choice((most, random.randint(1, most))))
    return Region(tuple(start), tuple(count), tuple(step))
