"""Validates what an engine rank requests from a trainer rank, before views of the shards are made."""

from __future__ import annotations

import math

import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import ITEM_BYTES, MAX_STEP, LocalRegion, is_within
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.routes.p2p.messages import SendRequest

MAX_REPEATS = 16  # how often an element may be requested; loaders read it once


def check_send_request(request: SendRequest, layout: SourceLayout, trainer_rank: int, engine_rank: int) -> None:
    """Raises Mismatch, naming ranks and tensor, unless all regions lie within the trainer rank's shards.

    `layout` is the trainer rank's own.
    """
    who = f"send request of engine rank {engine_rank} for trainer rank {trainer_rank}"
    if len(request.tensor_ids) % 4 or len(request.tensor_ids) != len(request.region_ids):
        raise _invalid(
            who,
            f"its columns have {len(request.tensor_ids)} and {len(request.region_ids)} bytes; both must be equal and a "
            "multiple of 4",
        )
    tensors = np.frombuffer(request.tensor_ids, "<i4").astype(np.int64)
    elements = np.frombuffer(request.region_ids, "<i4").astype(np.int64)
    if request.dtypes or request.dtype_ids:
        numbered = len(request.dtype_ids) == len(tensors) and max(request.dtype_ids, default=-1) < len(request.dtypes)
        if not numbered or not ITEM_BYTES.keys() >= set(request.dtypes):
            raise _invalid(
                who, f"its dtypes {request.dtypes[:4]} do not match its {len(request.dtype_ids)} dtype numbers"
            )
    if not len(tensors):
        return
    for column, size, of in ((tensors, len(layout.tensors), "tensors"), (elements, len(request.regions), "regions")):
        if column.min() < 0 or column.max() >= size:
            raise _invalid(who, f"its indices {column.min()} to {column.max()} are out of range for {size} {of}")
    shapes = layout.min_local_shapes(trainer_rank)
    numbers: dict[tuple[int, ...] | None, int] = {}
    kinds = np.array([numbers.setdefault(shape, len(numbers)) for shape in shapes], np.int64)
    alike, first, count = np.unique(
        kinds[tensors] * len(request.regions) + elements, return_index=True, return_counts=True
    )
    held = list(numbers)
    requested = 0
    for pair, row, times in zip(alike.tolist(), first.tolist(), count.tolist(), strict=True):
        shape, region = held[pair // len(request.regions)], request.regions[pair % len(request.regions)]
        if shape is None or not _is_within(region, shape):
            name = layout.tensors[int(tensors[row])].name
            raise _invalid(who, f"{region} exceeds its shard of {name}, which has shape {shape or (0,)}")
        requested += times * region.numel
    held_elements = sum(math.prod(shape) for shape in shapes if shape is not None)
    if requested > MAX_REPEATS * held_elements:
        raise _invalid(
            who,
            f"it requests {requested:,} elements, more than {MAX_REPEATS} times the {held_elements:,} that the trainer "
            "rank holds",
        )


def _is_within(region: LocalRegion, shape: tuple[int, ...]) -> bool:
    if region.is_flat and len(shape) == 1:
        if len(region.count) != len(region.step):
            return False
        steps = list(zip(region.count, region.step, strict=True))
        if any(n < 1 or not 1 <= s <= MAX_STEP for n, s in steps):
            return False
        return 0 <= region.start[0] < shape[0] - sum((n - 1) * s for n, s in steps)
    return is_within(region.start, region.count, region.step, shape)


def _invalid(who: str, why: str) -> Mismatch:
    return Mismatch(f"invalid {who}: {why}. Do both sides run the same version of sglang-reshard?")
