"""Reads flat buffers: checkpoint tensors flattened one after the other; each rank holds a range.

FSDP1's flat parameters, ZeRO-3's partitions and the buffers of distributed optimizers are such buffers. A range of a
tensor's elements in row-major order is a few boxes of it: the rest of a row, whole rows, the beginning of a row, and so
on for more dimensions. So each rank's piece is described where it is, and nothing is unsharded or copied.

ZeRO-3 flattens each parameter and gives every rank of its process group an equal range, the last ones padded. The
parameter itself is empty, or a gathered copy for as long as a module runs: small ones (`ds_persist`) and hpZ's
secondary partitions are such copies, too, and are left alone. ZeRO-1 and 2 leave parameters whole on every rank, so
they are read as any others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import LocalShard
from sglang_reshard.sources.fused import FusedSlice, NamedSlices, invalid_slice_reason

Range = tuple[int, int]  # first element of a flat buffer, and one past the last


@dataclass(frozen=True, slots=True)
class FlatMember:
    """A tensor in a flat buffer: its checkpoint name, its shape, and its first element's position in the buffer.

    slices  the checkpoint tensors that it represents, if it is a fused tensor; its own name is then none of them
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    slices: NamedSlices = ()


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """The members of a flat buffer, and the range of it that each rank holds, as (global rank, begin, end).

    Passed with this rank's piece, a tensor of one dimension that begins with the first element of its range; it may
    be longer. Positions in no member are padding. Ranks with the same range hold replicas. Pass the same object again
    while nothing changes: the update is then recognized as unchanged.
    """

    members: tuple[FlatMember, ...]
    ranges: tuple[tuple[int, int, int], ...]


def split_flat(
    where: str, buffer: FlatBuffer, local: torch.Tensor, trainer_rank: int, trainer_rank_of: Mapping[int, int]
) -> Iterator[LocalShard]:
    """Yields the checkpoint tensors of a flat buffer, with views of this rank's piece `local`.

    trainer_rank_of  global rank -> trainer rank, for the ranks that participate in the update

    Raises Mismatch, starting with `where`, for a piece that is shorter than its range and for an invalid slice, and
    Unsupported for a piece that is not contiguous.
    """
    held = {trainer_rank_of[rank]: (begin, end) for rank, begin, end in buffer.ranges if rank in trainer_rank_of}
    first, last = held.get(trainer_rank, (0, 0))
    if local.dim() != 1 or local.numel() < last - first:
        raise Mismatch(
            f"{where} is a tensor of shape {tuple(local.shape)}, but this trainer rank's piece of the flat buffer has "
            f"{last - first} elements; pass the piece itself, as a 1-D tensor"
        )
    if not local.is_contiguous():
        raise Unsupported(f"{where} is not contiguous (stride {local.stride(0)}); pass a contiguous piece")
    nothing = local.new_empty(0)
    for member in buffer.members:
        end = member.begin + math.prod(member.shape)
        ranges = tuple(
            (rank, max(a, member.begin) - member.begin, min(b, end) - member.begin)
            for rank, (a, b) in held.items()
            if max(a, member.begin) < min(b, end)
        )
        begin = max(first, member.begin)
        piece = local[begin - first : min(last, end) - first] if begin < min(last, end) else nothing
        if not member.slices:
            yield LocalShard(member.name, member.shape, flat_shard_map(member.shape, ranges), piece)
        for name, part in member.slices:
            if reason := invalid_slice_reason(part, member.shape):
                raise Mismatch(f"{where}: the slice {name} of its {member.name} {reason}")
            shard_map = _slice_shard_map(member.shape, ranges, part)
            yield LocalShard(name, part.shape, shard_map, piece if shard_map.shards_of(trainer_rank) else nothing)


@functools.lru_cache(maxsize=4096)
def flat_shard_map(shape: tuple[int, ...], ranges: tuple[tuple[int, int, int], ...]) -> ShardMap:
    """Returns the shard map of a tensor of `shape` (elements), of whose elements in row-major order ranks have ranges.

    ranges  (trainer rank, begin, end); the rank's local tensor begins with the first element of its range
    """
    # Of a contiguous tensor; empty dimensions count as one.
    strides = tuple(math.prod(max(1, n) for n in shape[d + 1 :]) for d in range(len(shape)))
    held = []
    for rank, begin, end in ranges:
        for box in flat_boxes(shape, begin, end):
            position = sum(n * s for n, s in zip(box.start, strides, strict=True))
            held.append((box, (position - begin,), rank))
    return ShardMap.of(held, strides)


@functools.lru_cache(maxsize=65536)
def _slice_shard_map(shape: tuple[int, ...], ranges: tuple[tuple[int, int, int], ...], part: FusedSlice) -> ShardMap:
    """Returns the shard map of a slice of that tensor; ranks have the local tensors that they have of the whole."""
    whole = flat_shard_map(shape, ranges)
    assert whole.strides is not None
    bounds, held = Box(part.start, part.stop), []
    for shard in whole.shards:
        if (common := shard.box.intersect(bounds)) is None:
            continue
        skipped = zip(common.start, shard.box.start, whole.strides, strict=True)
        position = shard.local_start[0] + sum((a - b) * s for a, b, s in skipped)
        start = tuple(common.start[axis] - part.start[axis] for axis in part.axes)
        stop = tuple(common.stop[axis] - part.start[axis] for axis in part.axes)
        held += [(Box(start, stop), (position,), rank) for rank in shard.ranks]
    return ShardMap.of(held, tuple(whole.strides[axis] for axis in part.axes))


def flat_boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yields boxes that are the elements `begin` to `end` of a tensor of `shape`, in row-major order.

    At most 2 n - 1 of them for n dimensions.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if begin == first * row and end == (last + 1) * row:
        yield Box((first, *(0,) * (len(shape) - 1)), (last + 1, *shape[1:]))
    elif first == last:
        for box in flat_boxes(shape[1:], begin - first * row, end - first * row):
            yield Box((first, *box.start), (first + 1, *box.stop))
    else:
        whole = -(-begin // row), end // row
        yield from flat_boxes(shape, begin, whole[0] * row)
        yield from flat_boxes(shape, whole[0] * row, whole[1] * row)
        yield from flat_boxes(shape, whole[1] * row, end)


def partition(where: str, name: str, parameter: Any) -> tuple[torch.Tensor, FlatBuffer]:
    """Returns this rank's piece of a partitioned parameter and its flat buffer, with one member of this name.

    Raises Unsupported, starting with `where`, for a piece that is on NVMe, or quantized.
    """
    piece = parameter.ds_tensor
    if piece.status.name != "AVAILABLE":
        raise Unsupported(
            f"{where} is partitioned by ZeRO-3 and its piece is not in memory (offload_param to NVMe). Offload "
            "parameters to the CPU, or do not offload them"
        )
    if hasattr(piece, "ds_quant_scale"):
        raise Unsupported(f"{where} is quantized by ZeRO-3; unset zero_quantized_nontrainable_weights")
    group = dist.get_process_group_ranks(parameter.ds_process_group)
    ranges = equal_ranges([group], int(piece.ds_numel), int(parameter.ds_numel))
    return piece, FlatBuffer((FlatMember(name, tuple(parameter.ds_shape), 0),), ranges)


def equal_ranges(groups: Iterable[Sequence[int]], size: int, total: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the `ranges` of a buffer of `total` elements. Each rank of a group holds `size` of them, in order."""
    numbered = ((number * size, rank) for group in groups for number, rank in enumerate(group))
    return tuple((rank, min(begin, total), min(begin + size, total)) for begin, rank in numbered)
