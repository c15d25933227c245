"""Chooses what a one-sided read of a strided region fetches: contiguous runs, or longer spans with the gaps in them.

Every descriptor of a read costs about as much as some bytes do. So a region whose runs are short (a few columns of a
row-major matrix) is read in spans that include the bytes between the runs, as long as these cost less than the
descriptors would.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np


class Runs(NamedTuple):
    """The runs of elements that a read of a region fetches.

    offsets  bytes from the region's first element to the first of each run, [runs]
    nbytes   of each run
    strides  of the region in the runs laid one after another, in elements
    """

    offsets: np.ndarray
    nbytes: int
    strides: tuple[int, ...]

    def is_row_major(self, count: tuple[int, ...]) -> bool:
        """Returns whether the runs, one after another, are the region of this shape in row-major order without gaps."""
        step = 1
        for n, stride in zip(reversed(count), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return False
            step *= n
        return True

    @property
    def total_bytes(self) -> int:
        return len(self.offsets) * self.nbytes


@cache
def plan_runs(
    count: tuple[int, ...],
    strides: tuple[int, ...],
    item_bytes: int,
    descriptor_bytes: int,
    max_ratio: float = math.inf,
) -> Runs:
    """Returns the runs of a region of memory that cost least.

    count, strides    of the region, in elements; `item_bytes` each
    descriptor_bytes  what one descriptor costs, as bytes that are read in the same time
    max_ratio         how many times the region's bytes may be read at most, at least 1
    """
    by_stride = sorted(range(len(count)), key=lambda dim: (-strides[dim], dim))
    most_bytes = max_ratio * math.prod(count) * item_bytes
    best: tuple[int, int] | None = None
    for outer in range(len(count) + 1):
        spanned = by_stride[outer:]
        nbytes = item_bytes * (1 + sum((count[dim] - 1) * strides[dim] for dim in spanned))
        runs = math.prod(count[dim] for dim in by_stride[:outer])
        cost = runs * (nbytes + descriptor_bytes)
        if runs * nbytes <= most_bytes and (best is None or cost < best[0]):
            best = cost, outer
    assert best is not None  # element by element, nothing else is read
    outer = best[1]
    offsets, packed = np.zeros(1, np.int64), list(strides)
    nbytes = item_bytes * (1 + sum((count[dim] - 1) * strides[dim] for dim in by_stride[outer:]))
    step = nbytes // item_bytes
    for dim in reversed(by_stride[:outer]):
        packed[dim] = step
        step *= count[dim]
    for dim in by_stride[:outer]:
        offsets = (offsets[:, None] + np.arange(count[dim]) * (strides[dim] * item_bytes)).reshape(-1)
    return Runs(offsets, nbytes, tuple(packed))
