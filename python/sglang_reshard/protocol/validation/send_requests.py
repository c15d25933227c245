"""What an engine rank asks a trainer rank for, before views of the shards are made."""

from __future__ import annotations

import math

import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import Region
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan.p2p import SendRequest

MAX_REPEATS = 16  # how often what a trainer rank holds may be asked for; loaders take it once
MAX_STEP = 1 << 31  # of a single element it may be more than the shard is long, but not more than torch can multiply


def check_order(order: SendRequest, layout: SourceLayout, trainer_rank: int, engine_rank: int) -> None:
    """Raise Mismatch, naming ranks and tensor, unless all of an order's regions are elements that the rank has.

    `layout` is the trainer rank's own.
    """
    who = f"the order of engine rank {engine_rank} for trainer rank {trainer_rank}"
    if len(order.tensors) % 4 or len(order.tensors) != len(order.elements):
        raise _wrong(who, f"its columns have {len(order.tensors)} and {len(order.elements)} bytes")
    tensors = np.frombuffer(order.tensors, "<i4").astype(np.int64)
    elements = np.frombuffer(order.elements, "<i4").astype(np.int64)
    if not len(tensors):
        return
    for column, size, of in ((tensors, len(layout.tensors), "tensors"), (elements, len(order.regions), "regions")):
        if column.min() < 0 or column.max() >= size:
            raise _wrong(who, f"it has numbers from {column.min()} to {column.max()} of {size} {of}")
    shapes = layout.min_local_shapes(trainer_rank)
    numbers: dict[tuple[int, ...] | None, int] = {}
    kinds = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes], np.int64)
    alike, first, count = np.unique(
        kinds[tensors] * len(order.regions) + elements, return_index=True, return_counts=True
    )
    held = list(numbers)
    asked = 0
    for pair, row, times in zip(alike.tolist(), first.tolist(), count.tolist(), strict=True):
        shape, region = held[pair // len(order.regions)], order.regions[pair % len(order.regions)]
        if shape is None or not _inside(region, shape):
            name = layout.tensors[int(tensors[row])].name
            raise _wrong(who, f"{region} is not inside its shard of {name}, which has the shape {shape or (0,)}")
        asked += times * region.numel
    has = sum(math.prod(shape) for shape in shapes if shape is not None)
    if asked > MAX_REPEATS * has:
        raise _wrong(who, f"it asks for {asked:,} elements of a rank that holds {has:,}")


def _inside(region: Region, shape: tuple[int, ...]) -> bool:
    if not len(region.start) == len(region.count) == len(region.step) == len(shape):
        return False
    bounds = zip(region.start, region.count, region.step, shape, strict=True)
    return all(a >= 0 and n >= 1 and 1 <= s <= MAX_STEP and a + (n - 1) * s < length for a, n, s, length in bounds)


def _wrong(who: str, why: str) -> Mismatch:
    return Mismatch(f"{who} cannot be carried out: {why}. Do both sides run the same version of sglang-reshard?")
