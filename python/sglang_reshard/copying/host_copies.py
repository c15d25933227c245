"""Copies in host memory: many small boxes become few, which are copied without Python code for each.

    copies, rest = HostCopies.of(pairs)  # torch copies the rest
    copies.run()

A pair of views of one dtype is a box of bytes at any address: boxes of different tensors are merged, too. numpy copies
small boxes in less than half of the time that torch needs for each; torch copies large ones in several threads.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from sglang_reshard.copying.copy_table import Dimension, Pair, merged_dimensions
from sglang_reshard.copying.merging import Point, merged_boxes

_TORCH_ELEMENTS = 32768  # from which torch uses several threads
_UNITS = 8, 4, 2, 1  # bytes that numpy moves at once
_assign: Any = operator.setitem  # its stub does not know that `...` is an index


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Boxes, as arrays. They hold addresses: the caller keeps the tensors alive."""

    destinations: list[np.ndarray]
    sources: list[np.ndarray]

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> tuple[HostCopies, list[Pair]]:
        """Returns the copies, and the pairs that are left to torch: those that cast, and large boxes.

        Pairs are of one shape each. All may be copied in any order, and at the same time.
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
        copies = cls([], [])
        for run, dimensions, point in merged_boxes(boxes, _is_apart):
            strides = [stride for _, *both in dimensions for stride in both]
            unit = next(n for n in _UNITS if math.gcd(run, *point, *strides) % n == 0)
            shape = *(n for n, _, _ in dimensions), run // unit
            written = _array(point[0], shape, (*(b for _, _, b in dimensions), unit), unit)
            read = _array(point[1], shape, (*(a for _, a, _ in dimensions), unit), unit)
            if written.size >= _TORCH_ELEMENTS and min(strides, default=0) >= 0:
                rest.append((torch.from_numpy(written), torch.from_numpy(read)))
            else:
                copies.destinations.append(written)
                copies.sources.append(read)
        return copies, rest

    def run(self) -> None:
        deque(map(_assign, self.destinations, repeat(...), self.sources), maxlen=0)


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
