"""Finds a strided view of a local shard whose dimensions are those of the checkpoint tensor.

A shard may hold its part transposed, every other row of it, or with other dimensions. A strided view of the same memory
then has the checkpoint tensor's dimensions, and boxes of the tensor are boxes of the view. Integers only; no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.geometry import BoxMapping, Geometry


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
