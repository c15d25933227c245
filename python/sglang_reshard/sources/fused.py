"""Splits fused tensors, which represent several checkpoint tensors: stacked experts, gate and up in one tensor.

    ("mlp.experts.gate_up_proj", tensor, FusedTensor((("mlp.experts.0.gate_proj.weight", fused_slice), ...)))

Each slice is a box of the fused tensor. Its sharding follows from that of the fused tensor, and its local shard is a
view of the fused local tensor. A model has as many fused tensors as layers and tens of thousands of slices, but few
distinct ones: the slices of equally sharded fused tensors are computed once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ShardBox, ShardMap
from sglang_reshard.layout.source_layout import LocalShard

if TYPE_CHECKING:
    from sglang_reshard.trace.geometry import BoxMapping

NamedSlices = tuple[tuple[str, "FusedSlice"], ...]  # checkpoint names, and their boxes of the fused tensor


class FusedSlice(msgspec.Struct, frozen=True, array_like=True):
    """A box of a fused tensor, `start <= index < stop` (elements), as a checkpoint tensor.

    axes  the fused tensor's dimensions that it has, in its own order; the box has length 1 along the others
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stop[axis] - self.start[axis] for axis in self.axes)


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """The checkpoint tensors that an input tensor represents, in place of its own name.

    Pass the same object again while nothing changes: the update is then recognized as unchanged.

    slices  (checkpoint name, box of the fused tensor) of each
    spec    None for a DTensor, or a plain tensor that every rank holds in full; otherwise the sharding of a flat local
            shard: an `ExplicitSharding`, or a spec like verl's `ShardSpec`
    """

    slices: NamedSlices
    spec: Any = None


def split_fused(
    where: str, slices: NamedSlices, shape: tuple[int, ...], shard_map: ShardMap, local: torch.Tensor, trainer_rank: int
) -> Iterator[LocalShard]:
    """Yields the checkpoint tensors of a fused tensor of global `shape`, with views of the rank's `local` tensor.

    Raises Mismatch for a slice that is not a box of the fused tensor, and Unsupported if a rank's elements of a slice
    are not a box of its local tensor; both messages start with `where`.
    """
    if shard_map.strides is not None:
        raise Unsupported(f"{where} is a fused tensor with flat local tensors; pass it as a member of a FlatBuffer")
    for name, fused_slice in slices:
        if reason := invalid_slice_reason(fused_slice, shape):
            raise Mismatch(f"{where}: its slice {name} {reason}")
    nothing = local.new_empty(0)
    local_slices = _local_slices(shard_map, tuple(fused_slice for _, fused_slice in slices), trainer_rank)
    for (name, fused_slice), found in zip(slices, local_slices, strict=True):
        if found is None:
            raise Unsupported(
                f"{where}: on one trainer rank, the elements of its slice {name} are not a box of the local tensor; "
                "pass the checkpoint tensors separately"
            )
        tensor = nothing if found.selection is None else local[found.selection]
        if found.order and found.selection is not None:
            tensor = tensor.permute(found.order)
        yield LocalShard(name, fused_slice.shape, found.shard_map, tensor)


def slice_of(view: torch.Tensor, shape: tuple[int, ...]) -> FusedSlice:
    """Returns the box that `view` is of a contiguous tensor of `shape` (elements); both may be on the meta device.

    Raises Unsupported if the view is not a box with its dimensions permuted.
    """
    whole = torch.Size(shape).numel() * view.element_size()
    if view.untyped_storage().nbytes() == whole:
        found = as_slice(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()), shape)
        if found is not None:
            return found
    raise Unsupported(
        f"a view of shape {tuple(view.shape)}, strides {tuple(view.stride())} and offset {view.storage_offset()} "
        f"is not a box of a tensor of shape {shape} with its dimensions permuted"
    )


def as_slice(offset: int, size: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> FusedSlice | None:
    """Returns the box that a strided view (elements) is of a contiguous tensor of `shape`; None if it is not one."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        steps[axis - 1] = steps[axis] * shape[axis]
    start, rest = [], offset
    for step in steps:
        index, rest = divmod(rest, step) if step else (0, 0)
        start.append(index)
    axes: list[int | None] = []
    for length, stride in zip(size, strides, strict=True):
        # The stride of a dimension of length 1 is arbitrary: it matches any dimension that is left over.
        fits = [a for a in range(len(shape)) if length > 1 < shape[a] and steps[a] == stride and a not in axes]
        if length < 1 or (length > 1 and not fits):
            return None
        axes.append(fits[0] if fits else None)
    left = iter([axis for axis in range(len(shape)) if axis not in axes])
    chosen = [next(left, None) if axis is None else axis for axis in axes]
    if rest or None in chosen:
        return None
    order = tuple(axis for axis in chosen if axis is not None)
    stop = [a + (size[order.index(axis)] if axis in order else 1) for axis, a in enumerate(start)]
    found = FusedSlice(tuple(start), tuple(stop), order)
    return None if invalid_slice_reason(found, shape) else found


def slice_of_boxes(
    shape: tuple[int, ...], boxes: Sequence[BoxMapping], fused_shape: tuple[int, ...]
) -> FusedSlice | None:
    """Returns the box of a fused tensor of `fused_shape` that a traced tensor of `shape` is; None if it is not one.

    boxes  of the traced tensor, with the elements' row-major positions in the fused tensor
    """

    def position(index: Sequence[int]) -> int:
        """Returns where an element of the result is in the fused tensor; 0 if it comes from elsewhere."""
        for box in boxes:
            skipped = [i - a for i, a in zip(index, box.start, strict=True)]
            if all(0 <= i < n for i, n in zip(skipped, box.size, strict=True)):
                return box.write + sum(i * s for i, s in zip(skipped, box.stride, strict=True))
        return 0

    first = position([0] * len(shape))
    strides = tuple(
        position([int(d == axis) for d in range(len(shape))]) - first if n > 1 else 0 for axis, n in enumerate(shape)
    )
    for box in boxes:
        steps = zip(box.size, box.stride, strides, strict=True)
        begins = first + sum(a * s for a, s in zip(box.start, strides, strict=True))
        if box.write != begins or any(n > 1 and step != s for n, step, s in steps):
            return None
    complete = sum(math.prod(box.size) for box in boxes) == math.prod(shape)
    return as_slice(first, shape, strides, fused_shape) if complete else None


def invalid_slice_reason(fused_slice: FusedSlice, shape: tuple[int, ...]) -> str:
    """Returns why a tensor of `shape` does not have this slice; empty if it has."""
    start, stop, axes = fused_slice.start, fused_slice.stop, fused_slice.axes
    if not len(start) == len(stop) == len(shape):
        return f"must have the {len(shape)} dimensions of shape {shape}: {fused_slice}"
    if any(not 0 <= a <= b <= n for a, b, n in zip(start, stop, shape, strict=True)):
        return f"exceeds shape {shape}: {fused_slice}"
    dropped = [axis for axis in range(len(shape)) if axis not in axes]
    if len(dropped) + len(axes) != len(shape) or any(stop[a] - start[a] != 1 for a in dropped):
        return f"must list each dimension once in `axes`, except dimensions of length 1: {fused_slice}"
    return ""


class _LocalSlice(NamedTuple):
    """A fused slice on one trainer rank."""

    shard_map: ShardMap
    selection: tuple[int | slice, ...] | None  # indexes the local tensor; None if the rank holds nothing of the slice
    order: tuple[int, ...]  # of the dimensions that are left then; empty if they are in order


@functools.lru_cache(maxsize=64)
def _local_slices(
    shard_map: ShardMap, slices: tuple[FusedSlice, ...], trainer_rank: int
) -> tuple[_LocalSlice | None, ...]:
    """Returns every slice; None for one whose elements are scattered over some rank's local tensor."""
    shards = shard_map.shards
    starts = np.array([shard.box.start for shard in shards], np.int64)
    stops = np.array([shard.box.stop for shard in shards], np.int64)
    interned: dict[ShardMap, ShardMap] = {}  # experts mostly differ in their ranks only
    found: list[_LocalSlice | None] = []
    for part in slices:
        overlaps = ((starts < part.stop) & (stops > part.start)).all(axis=1) if shards else np.empty(0, bool)
        empty = any(a >= b for a, b in zip(part.start, part.stop, strict=True))
        one = _local_slice([] if empty else [shards[i] for i in np.flatnonzero(overlaps)], part, trainer_rank)
        found.append(one._replace(shard_map=interned.setdefault(one.shard_map, one.shard_map)) if one else None)
    return tuple(found)


def _local_slice(shards: Sequence[ShardBox], part: FusedSlice, trainer_rank: int) -> _LocalSlice | None:
    """Returns a slice, from the shards of the fused tensor that overlap it."""
    overlaps = []
    held: dict[int, Box] = {}  # trainer rank -> the box of its local tensor that has the slice
    for shard in shards:
        start = tuple(map(max, shard.box.start, part.start))
        stop = tuple(map(min, shard.box.stop, part.stop))
        local_start = tuple(p + a - b for p, a, b in zip(shard.local_start, start, shard.box.start, strict=True))
        local_stop = tuple(p + b - a for p, a, b in zip(local_start, start, stop, strict=True))
        for rank in shard.ranks:
            overlaps.append((start, stop, local_start, rank))
            own = held.get(rank, Box(local_start, local_stop))
            held[rank] = Box(tuple(map(min, own.start, local_start)), tuple(map(max, own.stop, local_stop)))
    dropped = [axis for axis in range(len(part.start)) if axis not in part.axes]
    if any(own.shape[axis] != 1 for own in held.values() for axis in dropped):
        return None

    def within(index: tuple[int, ...], origin: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(index[axis] - origin[axis] for axis in part.axes)

    shard_map = ShardMap.of(
        (Box(within(start, part.start), within(stop, part.start)), within(local_start, held[rank].start), rank)
        for start, stop, local_start, rank in overlaps
    )
    selection = None
    if mine := held.get(trainer_rank):
        selection = tuple(one if axis in part.axes else one.start for axis, one in enumerate(mine.slices()))
    kept = sorted(part.axes)
    order = tuple(map(kept.index, part.axes))
    return _LocalSlice(shard_map, selection, order if order != tuple(range(len(order))) else ())
