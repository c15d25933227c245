"""Tensors that stand for several checkpoint tensors: experts stacked in memory, gate and up fused.

    ("mlp.experts.gate_up_proj", tensor, Stack((("mlp.experts.0.gate_proj.weight", part), ...)))

Each part is a box of the stacked tensor. Who holds what of it follows from who holds what of the stack, and
its shard is a view of the stack's own local tensor. A model has as many stacks as layers, and tens of
thousands of parts, but few kinds of them: what becomes of the parts of a stack is worked out once a kind.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import Shard, ShardMap
from sglang_reshard.layout.source_layout import MeshSharding

Parts = tuple[tuple[str, "FusedSlice"], ...]  # the checkpoint's names, and where in the stack they are


class FusedSlice(msgspec.Struct, frozen=True, array_like=True):
    """A box of a stacked tensor, `start <= index < stop` (elements), as a tensor of its own.

    axes  the dimensions that it has, in its order; it has length 1 along the others, which go
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stop[axis] - self.start[axis] for axis in self.axes)


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """What a given tensor stands for, in place of its own name. Give the same object again for what did not change.

    spec  None for a DTensor, or a plain tensor that every rank holds whole; otherwise how a flat local shard is
          held: a `ExplicitSharding`, or a spec like verl's `ShardSpec`
    """

    parts: Parts
    spec: Any = None


class FusedMember(NamedTuple):
    """A checkpoint tensor that a given one stands for. `shard` is a view of that one's local tensor, or is empty."""

    name: str
    shape: tuple[int, ...]
    distribution: MeshSharding | ShardMap
    shard: torch.Tensor


def members(
    where: str, parts: Parts, shape: tuple[int, ...], held: ShardMap, local: torch.Tensor, trainer_rank: int
) -> Iterator[FusedMember]:
    """What becomes of a stack of `shape` that is held like this, seen by one of its holders.

    Raises Mismatch for a part that is no box of the stack, and Unsupported for one of which a rank's elements are
    no box of its local tensor; both begin with `where`.
    """
    for name, part in parts:
        if why := _fault(part, shape):
            raise Mismatch(f"{where}: its part {name} {why}")
    nothing = local.new_empty(0)
    cuts = _cuts(held, tuple(part for _, part in parts), trainer_rank)
    for (name, part), cut in zip(parts, cuts, strict=True):
        if cut is None:
            raise Unsupported(
                f"{where}: what a trainer rank holds of its part {name} is no box of that rank's local tensor; "
                "give the parts as tensors of their own"
            )
        shard = nothing if cut.box is None else local[cut.box]
        if cut.order and cut.box is not None:
            shard = shard.permute(cut.order)
        yield FusedMember(name, part.shape, cut.holdings, shard)


def slice_of(view: torch.Tensor, shape: tuple[int, ...]) -> FusedSlice:
    """The part that `view` is of a contiguous tensor of `shape`, whose memory it is a view of; meta tensors will do.

    Raises Unsupported for what is no box of it with its dimensions in some order.
    """
    whole = torch.Size(shape).numel() * view.element_size()
    if view.untyped_storage().nbytes() == whole:
        part = as_slice(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()), shape)
        if part is not None:
            return part
    raise Unsupported(
        f"a view of shape {tuple(view.shape)}, strides {tuple(view.stride())} and offset {view.storage_offset()} "
        f"is no box of a tensor of shape {shape}, with its dimensions in some order"
    )


def as_slice(offset: int, size: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> FusedSlice | None:
    """The part that a view (elements) is of a contiguous tensor of `shape`; None if it is no box, its axes permuted."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        steps[axis - 1] = steps[axis] * shape[axis]
    start, rest = [], offset
    for step in steps:
        index, rest = divmod(rest, step) if step else (0, 0)
        start.append(index)
    axes: list[int | None] = []
    for length, stride in zip(size, strides, strict=True):
        # Along a dimension of length 1 the stride says nothing, and any dimension that is left over will do.
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
    part = FusedSlice(tuple(start), tuple(stop), order)
    return None if _fault(part, shape) else part


def _fault(part: FusedSlice, shape: tuple[int, ...]) -> str:
    """Why there is no such part of a tensor of `shape`; empty if there is."""
    if not len(part.start) == len(part.stop) == len(shape):
        return f"has not the {len(shape)} dimensions of the shape {shape}: {part}"
    if any(not 0 <= a <= b <= n for a, b, n in zip(part.start, part.stop, shape, strict=True)):
        return f"does not lie inside the shape {shape}: {part}"
    gone = [axis for axis in range(len(shape)) if axis not in part.axes]
    if len(gone) + len(part.axes) != len(shape) or any(part.stop[a] - part.start[a] != 1 for a in gone):
        return f"must name each of its dimensions once, and may leave out those of length 1: {part}"
    return ""


class _Cut(NamedTuple):
    """A part for one trainer rank.

    box    which elements of the rank's local tensor it is, as an index of it; None where the rank holds nothing of it
    order  of the dimensions that are left then; empty if they are in order
    """

    holdings: ShardMap
    box: tuple[int | slice, ...] | None
    order: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _cuts(held: ShardMap, parts: tuple[FusedSlice, ...], trainer_rank: int) -> tuple[_Cut | None, ...]:
    """All parts of a stack, in order. Where its elements are scattered over a rank's local tensor it is None."""
    starts = np.array([piece.box.start for piece in held.pieces], np.int64)
    stops = np.array([piece.box.stop for piece in held.pieces], np.int64)
    alike: dict[ShardMap, ShardMap] = {}  # experts differ in hardly anything but their holders
    found: list[_Cut | None] = []
    for part in parts:
        meet = ((starts < part.stop) & (stops > part.start)).all(axis=1) if held.pieces else np.empty(0, bool)
        some = all(a < b for a, b in zip(part.start, part.stop, strict=True))
        cut = _cut([held.pieces[i] for i in np.flatnonzero(meet)] if some else [], part, trainer_rank)
        found.append(cut._replace(holdings=alike.setdefault(cut.holdings, cut.holdings)) if cut else None)
    return tuple(found)


def _cut(pieces: Sequence[Shard], part: FusedSlice, trainer_rank: int) -> _Cut | None:
    """A part, from the pieces of the stack that it has elements in common with."""
    common = []
    begin: dict[int, tuple[int, ...]] = {}  # trainer rank -> where its elements begin in its local tensor
    end: dict[int, tuple[int, ...]] = {}
    for piece in pieces:
        start = tuple(map(max, piece.box.start, part.start))
        stop = tuple(map(min, piece.box.stop, part.stop))
        at = tuple(p + a - b for p, a, b in zip(piece.at, start, piece.box.start, strict=True))
        last = tuple(p + b - a for p, a, b in zip(at, start, stop, strict=True))
        common.append((start, stop, at, piece.ranks))
        for rank in piece.ranks:
            begin[rank] = tuple(map(min, begin.get(rank, at), at))
            end[rank] = tuple(map(max, end.get(rank, last), last))
    gone = [axis for axis in range(len(part.start)) if axis not in part.axes]
    if any(end[rank][axis] - begin[rank][axis] != 1 for rank in begin for axis in gone):
        return None

    def inside(index: tuple[int, ...], origin: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(index[axis] - origin[axis] for axis in part.axes)

    holdings = ShardMap.of(
        (Box(inside(start, part.start), inside(stop, part.start)), inside(at, begin[rank]), rank)
        for start, stop, at, ranks in common
        for rank in ranks
    )
    box = None
    if trainer_rank in begin:
        bounds = enumerate(zip(begin[trainer_rank], end[trainer_rank], strict=True))
        box = tuple(slice(a, b) if axis in part.axes else a for axis, (a, b) in bounds)
    kept = sorted(part.axes)
    order = tuple(map(kept.index, part.axes))
    return _Cut(holdings, box, order if order != tuple(range(len(order))) else ())
