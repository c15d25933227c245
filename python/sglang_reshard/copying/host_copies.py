"""Copies in host memory: many small boxes become few, which are copied without Python code for each.

A pair of views of one dtype is a box of bytes at any address: boxes of different tensors are merged, too. numpy copies
small boxes in less than half of the time that torch needs for each; torch copies large ones in several threads.

Boxes of one shape that follow one another at equal distances are merged: the experts of a layer, fused in the engine's
memory and one after the other in the trainer's, or the parts of a tensor that several ranks hold. Any two boxes of one
shape are at one distance, so that merging halves what has no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

_TORCH_ELEMENTS = 32768  # from which torch uses several threads
_UNITS = 8, 4, 2, 1  # bytes that numpy moves at once
Pair = tuple[torch.Tensor, torch.Tensor]  # destination, source
Dimension = tuple[int, int, int]  # size, stride in the source, stride in the destination
K = TypeVar("K", bound=Hashable)
Point = tuple[int, int]  # where a box begins: in the destination, in the source
MayMerge = Callable[[K, tuple[Dimension, ...], Point], bool]
_MAX_DIMENSIONS = 8


@lru_cache(maxsize=4096)  # boxes of a model have few shapes
def merged_dimensions(
    size: tuple[int, ...], from_strides: tuple[int, ...], to_strides: tuple[int, ...]
) -> tuple[tuple[Dimension, ...], int]:
    """Returns the fewest dimensions with the same elements, the destination's most contiguous last, and a run.

    The run is the length that is contiguous on both sides; it is no longer a dimension. 1 if nothing is.
    """
    dimensions = [d for d in zip(size, from_strides, to_strides, strict=True) if d[0] > 1]
    dimensions.sort(key=lambda d: (d[2], d[1]), reverse=True)
    merged: list[Dimension] = []
    for n, a, b in dimensions:
        if merged and merged[-1][1:] == (n * a, n * b):
            merged[-1] = merged[-1][0] * n, a, b
        else:
            merged.append((n, a, b))
    if merged and merged[-1][1:] == (1, 1):
        return tuple(merged[:-1]), merged[-1][0]
    return tuple(merged), 1


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


def is_ascending(_kind: object, dimensions: tuple[Dimension, ...], _point: Point) -> bool:
    """A view of a tensor has no negative strides."""
    _, *strides = dimensions[0]
    return min(strides) > 0


def host_copies(pairs: Iterable[Pair]) -> tuple[list[np.ndarray], list[np.ndarray], list[Pair]]:
    """Returns boxes to write and boxes to read, and the pairs that are left to torch: those that cast, and large boxes.

    Pairs are of one shape each. All may be copied in any order, and at the same time. Boxes hold addresses: the caller
    keeps the tensors alive.
    """
    boxes: dict[tuple[int, tuple[Dimension, ...]], list[Point]] = {}  # by bytes of a run, and dimensions in bytes
    rest = []
    for destination, source in pairs:
        if not _is_copied_as_bytes(destination, source):
            rest.append((destination, source))
        elif destination.numel():
            size = destination.element_size()
            dimensions, run = merged_dimensions(tuple(source.shape), source.stride(), destination.stride())
            in_bytes = tuple((n, a * size, b * size) for n, a, b in dimensions)
            boxes.setdefault((run * size, in_bytes), []).append((destination.data_ptr(), source.data_ptr()))
    destinations, sources = [], []
    for run, dimensions, point in merged_boxes(boxes, _is_apart):
        strides = [stride for _, *both in dimensions for stride in both]
        unit = next(n for n in _UNITS if math.gcd(run, *point, *strides) % n == 0)
        shape = *(n for n, _, _ in dimensions), run // unit
        written = _array(point[0], shape, (*(b for _, _, b in dimensions), unit), unit)
        read = _array(point[1], shape, (*(a for _, a, _ in dimensions), unit), unit)
        if written.size >= _TORCH_ELEMENTS and min(strides, default=0) >= 0:
            rest.append((torch.from_numpy(written), torch.from_numpy(read)))
        else:
            destinations.append(written)
            sources.append(read)
    return destinations, sources, rest


def _is_copied_as_bytes(destination: torch.Tensor, source: torch.Tensor) -> bool:
    alike = destination.dtype == source.dtype and destination.shape == source.shape
    lazy = source.is_neg() or source.is_conj() or destination.is_neg() or destination.is_conj()
    return alike and not lazy and destination.device.type == source.device.type == "cpu"


def _is_apart(run: int, dimensions: tuple[Dimension, ...], point: Point) -> bool:
    """Returns whether the bytes between the first and the last of one side are not mixed with those of the other.

    numpy would copy the source first, as it does not look closer.
    """
    (to_low, to_high), (from_low, from_high) = (
        (
            point[side] + sum(min((d[0] - 1) * d[2 - side], 0) for d in dimensions),
            point[side] + sum(max((d[0] - 1) * d[2 - side], 0) for d in dimensions) + run,
        )
        for side in range(2)
    )
    return to_high <= from_low or from_high <= to_low


class _Memory:
    """Memory that numpy makes an array of. It belongs to somebody else."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, size: tuple[int, ...], strides: tuple[int, ...], unit: int) -> None:
        self.__array_interface__ = {
            "data": (address, False), "shape": size, "strides": strides, "typestr": f"<i{unit}", "version": 3,
        }  # fmt: skip


def _array(address: int, size: tuple[int, ...], strides: tuple[int, ...], unit: int) -> np.ndarray:
    return np.asarray(_Memory(address, size, strides, unit))
