"""One view of a local shard in which what it holds of a checkpoint tensor lies as in the checkpoint tensor.

A shard may hold its part of a checkpoint tensor transposed, every other row of it, or with other dimensions. A
strided view of the same memory then has the checkpoint tensor's dimensions, and boxes of one are boxes of the other.
Integers only; no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.geometry import BoxMapping, Geometry, row_major


class LocalView(NamedTuple):
    """view: of the shard's memory, in elements; None for the shard as it is. at: where each box starts in it."""

    view: Geometry | None
    at: tuple[tuple[int, ...], ...]


def local_view(boxes: Sequence[BoxMapping], local_shape: tuple[int, ...]) -> LocalView:
    """The view for `boxes` of a checkpoint tensor, which say where in a contiguous shard their elements are.

    Raises Unsupported when no strided view does.
    """
    strides = _strides(boxes)
    own = Geometry(0, local_shape, row_major(local_shape))
    if len(strides) == len(local_shape) and all(s in (None, t) for s, t in zip(strides, own.stride, strict=True)):
        at = _places(own, boxes)
        if at is not None:
            return LocalView(None, at)
    view = _spanned(strides, boxes[0], own.numel)
    at = _places(view, boxes) if view is not None else None
    if at is None:
        raise Unsupported("its elements lie in the local shard in an order that no strided view makes right")
    return LocalView(view, at)


def _strides(boxes: Sequence[BoxMapping]) -> list[int | None]:
    """Elements between neighbours of each dimension; None for one in which every box has one index only."""
    strides: list[int | None] = [None] * len(boxes[0].size)
    for box in boxes:
        for dim, (size, stride) in enumerate(zip(box.size, box.stride, strict=True)):
            if size > 1 and strides[dim] not in (None, stride):
                raise Unsupported(f"neighbours in its dimension {dim} lie {strides[dim]} and {stride} elements apart")
            if size > 1:
                strides[dim] = stride
    return strides


def _spanned(strides: Sequence[int | None], box: BoxMapping, numel: int) -> Geometry | None:
    """The largest view with these strides that `box` is aligned with; None if its dimensions would overlap."""
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


def _places(view: Geometry, boxes: Sequence[BoxMapping]) -> tuple[tuple[int, ...], ...] | None:
    """Where in the view each box starts; None if one of them is not a box of it."""
    places = []
    order = sorted((dim for dim, size in enumerate(view.size) if size > 1), key=lambda dim: -view.stride[dim])
    for box in boxes:
        at, left = [0] * len(view.size), box.write - view.offset
        for dim in order:
            at[dim], left = divmod(left, view.stride[dim])
        if left or any(a + n > size for a, n, size in zip(at, box.size, view.size, strict=True)):
            return None
        places.append(tuple(at))
    return tuple(places)
