"""Defines boxes and strided regions of element indices, and their intersections.

Integer arithmetic without torch, so that it can be tested by brute force. All boxes are half-open, `start <= index <
stop`, with one entry per tensor dimension; a zero-dimensional tensor has one element and empty tuples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch

# Largest step of a region from another process. With one element along a dimension, any step stays within the tensor,
# but its product with a stride has to fit into 64 bits.
MAX_STEP = 1 << 31
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
ALIGN_BYTES = 16  # offsets in buckets and messages are multiples of it, so that any dtype can view them
Bytes = TypeVar("Bytes", int, np.ndarray)


def aligned(nbytes: Bytes, unit: int = ALIGN_BYTES) -> Bytes:
    """Rounds up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, global shape (elements) and dtype (torch's name without the prefix, "bfloat16") of a checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes


class Box(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A half-open box of element indices of one tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns the common elements; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def slices(self) -> tuple[slice, ...]:
        """Returns the index expression of the box: `tensor[box.slices()]`."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A strided box: `count` indices from `start`, `step` apart, along each dimension."""

    start: tuple[int, ...]
    count: tuple[int, ...]
    step: tuple[int, ...]

    @classmethod
    def of(cls, box: Box) -> Region:
        return cls(box.start, box.shape, (1,) * len(box.start))

    @property
    def numel(self) -> int:
        return math.prod(self.count)

    def part(self, box: Box) -> Region:
        """Returns the elements in a box of this region's own indices, which count from its start, a step each."""
        start = tuple(a + b * s for a, b, s in zip(self.start, box.start, self.step, strict=True))
        return Region(start, box.shape, self.step)

    def intersect(self, box: Box) -> tuple[Region, tuple[int, ...]] | None:
        """Returns the elements inside `box`, and by how many steps they start later than this region; None if none."""
        start, count, skipped = [], [], []
        for a, n, s, lo, hi in zip(self.start, self.count, self.step, box.start, box.stop, strict=True):
            first = max(0, -((a - lo) // s)) if a < lo else 0
            last = min(n, -((a - hi) // s)) if hi > a else 0  # one past the end
            if last <= first:
                return None
            start.append(a + first * s)
            count.append(last - first)
            skipped.append(first)
        return Region(tuple(start), tuple(count), self.step), tuple(skipped)

    def is_within(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a region from another process lies in a tensor of `shape` (elements)."""
        if not len(self.start) == len(self.count) == len(self.step) == len(shape):
            return False
        dims = zip(self.start, self.count, self.step, shape, strict=True)
        return all(a >= 0 and n >= 1 and 1 <= s <= MAX_STEP and a + (n - 1) * s < length for a, n, s, length in dims)

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Returns the index expression of the region in a tensor whose first element has the index `origin`."""
        origin = origin or (0,) * len(self.start)
        return tuple(
            slice(a - o, a - o + (n - 1) * s + 1, s)
            for a, n, s, o in zip(self.start, self.count, self.step, origin, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LocalRegion(Region):
    """A region of a trainer rank's local tensor: `count` elements along each dimension, `step` apart, from `start`.

    Of a flat local tensor, `start` is one number, its first element; the steps are then elements of the local tensor.
    """

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> LocalRegion:
        """Returns all of a local tensor of `shape` (elements)."""
        return cls((0,) * len(shape), tuple(shape), (1,) * len(shape))

    @property
    def is_flat(self) -> bool:
        return len(self.start) == 1  # a local tensor of one dimension is the same either way

    def memory(self, strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Returns first element and strides in the memory of a local tensor with these strides, all in elements."""
        if self.is_flat:
            return self.start[0] * strides[0], tuple(n * strides[0] for n in self.step)
        offset = sum(a * s for a, s in zip(self.start, strides, strict=True))
        return offset, tuple(n * s for n, s in zip(self.step, strides, strict=True))

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the region as a view of the local tensor."""
        offset, strides = self.memory(local.stride())
        return local.as_strided(self.count, strides, int(local.storage_offset()) + offset)


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """Yields boxes of at most `max_elements` elements that cover `box`, in row-major order.

    Each is contiguous in the row-major order of `box`: written one after the other, they are the row-major box.
    """
    if max_elements < 1:
        raise ValueError(f"max_elements must be at least 1, not {max_elements}")
    shape = box.shape
    if math.prod(shape) <= max_elements:
        yield box
        return
    axis = next(i for i, n in enumerate(shape) if n > 1)
    row = math.prod(shape[axis + 1 :])
    rows = max(1, max_elements // row)
    for first in range(box.start[axis], box.stop[axis], rows):
        last = min(first + rows, box.stop[axis])
        part = Box(
            (*box.start[:axis], first, *box.start[axis + 1 :]),
            (*box.stop[:axis], last, *box.stop[axis + 1 :]),
        )
        if part.numel <= max_elements:
            yield part
        else:
            yield from split(part, max_elements)
