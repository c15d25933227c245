"""Merges many boxes that are copied into few: those of one shape that follow one another at equal distances.

The experts of a layer are such boxes, fused in the engine's memory and one after the other in the trainer's; so are the
parts of a tensor that several ranks hold. Any two boxes of one shape are at one distance, so that merging halves what
has no order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from sglang_reshard.copying.copy_table import Dimension

K = TypeVar("K", bound=Hashable)
Point = tuple[int, int]  # where a box begins: in the destination, in the source
MayMerge = Callable[[K, tuple[Dimension, ...], Point], bool]
_MAX_DIMENSIONS = 8


def merged_boxes(
    boxes: Mapping[tuple[K, tuple[Dimension, ...]], Sequence[Point]], may_merge: MayMerge[K]
) -> Iterator[tuple[K, tuple[Dimension, ...], Point]]:
    """Yields fewer boxes with the same elements: kind, dimensions, and where it begins.

    boxes      kind and dimensions -> where boxes of these begin; only those of one kind are merged
    may_merge  whether a box may be made of smaller ones; the strides of its first dimension may be negative
    """
    while boxes:
        larger: dict[tuple[K, tuple[Dimension, ...]], list[Point]] = {}
        for (kind, dimensions), unordered in boxes.items():
            points = sorted(unordered)
            for first, count in _equidistant_runs(points):
                if count > 1 and len(dimensions) < _MAX_DIMENSIONS:
                    (a, b), (c, d) = points[first : first + 2]
                    grown = ((count, d - b, c - a), *dimensions)
                    if may_merge(kind, grown, points[first]):
                        larger.setdefault((kind, grown), []).append(points[first])
                        continue
                for point in points[first : first + count]:
                    yield kind, dimensions, point
        boxes = larger


def _equidistant_runs(points: Sequence[Point]) -> Iterator[tuple[int, int]]:
    """Yields first and count of runs of points that follow one another at equal distances; each point is in one."""
    first, end = 0, len(points)
    while first < end:
        stop = first + 1
        if stop < end:
            (a, b), (c, d) = points[first], points[stop]
            step, stop = (c - a, d - b), stop + 1
            while stop < end and (points[stop][0] - c, points[stop][1] - d) == step:
                (c, d), stop = points[stop], stop + 1
        yield first, stop - first
        first = stop


class StridedCopy(NamedTuple):
    """A copy of `size` elements along each dimension, from one block of memory to another.

    target  name of the parameter written to; its offset and strides are in elements of its dtype
    source  trainer rank and mapping read from; its offset and strides are in elements of `dtype`
    """

    target: str
    target_offset: int
    target_strides: tuple[int, ...]
    source: tuple[int, int]
    source_offset: int
    source_strides: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str


def merge_strided(copies: Iterable[StridedCopy]) -> list[StridedCopy]:
    """Returns fewer copies of the same elements, in any order."""
    boxes: dict[tuple[tuple[str, tuple[int, int], str], tuple[Dimension, ...]], list[Point]] = {}
    for copy in copies:
        dimensions = tuple(zip(copy.size, copy.source_strides, copy.target_strides, strict=True))
        kind = copy.target, copy.source, copy.dtype
        boxes.setdefault((kind, dimensions), []).append((copy.target_offset, copy.source_offset))
    found = []
    for (target, source, dtype), dimensions, (target_offset, source_offset) in merged_boxes(boxes, _is_ascending):
        size, source_strides, target_strides = zip(*dimensions, strict=True) if dimensions else ((), (), ())
        found.append(
            StridedCopy(target, target_offset, target_strides, source, source_offset, source_strides, size, dtype)
        )
    return found


def _is_ascending(_kind: object, dimensions: tuple[Dimension, ...], _point: Point) -> bool:
    """A view of a tensor has no negative strides."""
    _, *strides = dimensions[0]
    return min(strides) > 0
