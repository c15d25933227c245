"""Inverts a program: the boxes of each checkpoint tensor in an engine rank's live memory, and their places.

An engine that has been updated can so be read like a trainer. The tensors that its loader has copied are in live
memory, or in the scratch memory for operands of expressions; values that a step has changed since are lost.

A shard may hold its part transposed, every other row of it, or with other dimensions. A strided view of the same memory
then has the checkpoint tensor's dimensions, and boxes of the tensor are boxes of the view.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.trace.folded import UNFOLD
from sglang_reshard.trace.geometry import BoxMapping, Geometry
from sglang_reshard.trace.program import Copy, Program


@dataclass(frozen=True, slots=True)
class LiveShard:
    """One engine rank's part of a checkpoint tensor.

    tensor    a view of its memory, of the dtype that the engine has
    sharding  lists this rank's boxes only
    """

    name: str
    tensor: torch.Tensor
    sharding: ExplicitSharding


def live_shards(program: Program, shapes: Mapping[str, tuple[int, ...]], engine_rank: int) -> list[LiveShard]:
    """Returns the shards that a rank holds after an update by `program`, in the order in which it copies them.

    shapes  global shape (elements) of each checkpoint tensor

    Raises Unsupported, naming the tensor, for one that cannot be read back from where it was copied to.
    """
    shards, unreadable = readable_shards(program, shapes, engine_rank)
    for name, why in unreadable.items():
        raise Unsupported(
            f"engine rank {engine_rank}: {name} cannot be read from the live weights: {why}. Update engines of this "
            "model from the trainer"
        )
    return shards


def readable_shards(
    program: Program, shapes: Mapping[str, tuple[int, ...]], engine_rank: int
) -> tuple[list[LiveShard], dict[str, str]]:
    """Returns the shards of tensors that can be read back, and why others cannot, by name."""
    changed = {step.target for step in program.steps if step.description.startswith("from ")} | set(program.arrivals)
    folded = tuple(f"{step.target}." if step.target else "" for step in program.steps if step.description == UNFOLD)
    changed |= {target for target in program.targets if target.startswith(folded)} if folded else set()
    copies: dict[str, list[Copy]] = {}
    for copy in program.copies:
        copies.setdefault(copy.source, []).append(copy)
    shards, unreadable = [], {}
    for name, of_tensor in copies.items():
        kept = [copy for copy in of_tensor if copy.target not in changed]
        try:
            if converted := [copy.target for copy in of_tensor if copy.target in program.arrivals]:
                # Another engine would read the rest of it, and convert only what its own trainer ranks send.
                raise Unsupported(f"the engine converts it where it arrives, for {converted[0]}")
            if not kept:
                raise Unsupported(
                    f"the loader computes {of_tensor[0].target} from it in place, so its own values are not kept"
                )
            tensor, boxes = _held(program, kept)
        except Unsupported as error:
            unreadable[name] = str(error)
            continue
        shard_map = ShardMap.of((box, start, engine_rank) for box, start in boxes)
        shards.append(LiveShard(name, tensor, ExplicitSharding(shapes[name], shard_map)))
    return shards, unreadable


def _held(program: Program, copies: list[Copy]) -> tuple[torch.Tensor, list[tuple[Box, tuple[int, ...]]]]:
    """Returns a view that shows the elements written by `copies` as boxes, and these, each with its start in it."""
    found: dict[str, list[BoxMapping]] = {}
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for copy in copies:
        for mapping in _without_gaps(copy):
            if (key := (mapping.start, mapping.size)) not in seen:  # else a tied weight
                seen.add(key)
                found.setdefault(copy.target, []).append(mapping)
    if len(found) > 1:
        raise Unsupported(f"its parts are in {' and '.join(found)}")
    ((target, mappings),) = found.items()
    flat = program.targets[target]
    view, starts = shard_view(mappings, (flat.numel(),))
    tensor = flat if view is None else flat.as_strided(view.size, view.stride, view.offset)
    stops = (tuple(a + n for a, n in zip(m.start, m.size, strict=True)) for m in mappings)
    return tensor, [(Box(m.start, stop), at) for m, stop, at in zip(mappings, stops, starts, strict=True)]


def _without_gaps(copy: Copy) -> Iterator[BoxMapping]:
    """Yields the boxes that a strided region consists of."""
    region = copy.region
    unit = (1,) * len(region.count)
    strided = [n if step > 1 else 1 for n, step in zip(region.count, region.step, strict=True)]
    size = tuple(1 if of > 1 else n for n, of in zip(region.count, strided, strict=True))
    for index in itertools.product(*map(range, strided)):
        start = tuple(a + i * step for a, i, step in zip(region.start, index, region.step, strict=True))
        offset = copy.offset + sum(i * s for i, s in zip(index, copy.strides, strict=True))
        yield BoxMapping(start, size, unit, offset, copy.strides)


def shard_view(
    boxes: Sequence[BoxMapping], local_shape: tuple[int, ...]
) -> tuple[Geometry | None, tuple[tuple[int, ...], ...]]:
    """Returns a view of a contiguous shard that shows `boxes` as boxes, and the index of each start in it.

    boxes  of a checkpoint tensor; `write` and `stride` say where in the shard their elements are

    The view, in elements of the shard's memory, is None for the shard as it is. Raises Unsupported if there is no
    such view.
    """
    strides = _strides(boxes)
    own = Geometry.contiguous(local_shape)
    if len(strides) == len(local_shape) and all(s in (None, t) for s, t in zip(strides, own.stride, strict=True)):
        starts = _starts(own, boxes)
        if starts is not None:
            return None, starts
    view = _largest_view(strides, boxes[0], own.numel)
    starts = _starts(view, boxes) if view is not None else None
    if starts is None:
        raise Unsupported("its elements in live memory are not in the checkpoint tensor's order")
    return view, starts


def _strides(boxes: Sequence[BoxMapping]) -> list[int | None]:
    """Returns the stride of each dimension; None for a dimension where every box has size 1."""
    strides: list[int | None] = [None] * len(boxes[0].size)
    for box in boxes:
        for dim, (size, stride) in enumerate(zip(box.size, box.stride, strict=True)):
            if size > 1 and strides[dim] not in (None, stride):
                raise Unsupported(
                    f"its parts have different strides in live memory, {strides[dim]} and {stride} in dimension {dim}"
                )
            if size > 1:
                strides[dim] = stride
    return strides


def _largest_view(strides: Sequence[int | None], box: BoxMapping, numel: int) -> Geometry | None:
    """Returns the largest view with these strides that `box` is aligned with; None if its dimensions would overlap."""
    order = sorted((s, d) for d, s in enumerate(strides) if s is not None)[::-1]
    if not order and strides:
        order = [(1, len(strides) - 1)]
    sizes, steps = [1] * len(strides), [1] * len(strides)
    if not order:
        return Geometry(box.write, (), ())
    innermost = order[-1][0]
    if innermost < 1 or any(outer % inner for (outer, _), (inner, _) in itertools.pairwise(order)):
        return None
    offset = box.write % innermost
    for number, (stride, dim) in enumerate(order):
        reach = order[number - 1][0] if number else numel - 1 - offset + innermost
        sizes[dim], steps[dim] = reach // stride, stride
    return Geometry(offset, tuple(sizes), tuple(steps))


def _starts(view: Geometry, boxes: Sequence[BoxMapping]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the index in the view at which each box starts; None if one of them is not a box of the view."""
    starts = []
    order = sorted((dim for dim, size in enumerate(view.size) if size > 1), key=lambda dim: -view.stride[dim])
    for box in boxes:
        at, left = [0] * len(view.size), box.write - view.offset
        for dim in order:
            at[dim], left = divmod(left, view.stride[dim])
        if left or any(a + n > size for a, n, size in zip(at, box.size, view.size, strict=True)):
            return None
        starts.append(tuple(at))
    return tuple(starts)
