"""Which elements a digest is of: all, or some rows of every tensor, others in every update. Without torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from sglang_reshard.layout.regions import Region

WHOLE_ELEMENTS = 4096  # tensors with no more than these are never sampled


class Narrowed(NamedTuple):
    """The selected part of a region, and where it is in it: `view_of_region[slices]`."""

    region: Region
    slices: tuple[slice, ...]


class Selection(msgspec.Struct, frozen=True, array_like=True):
    """All elements where `one_in` is 1; otherwise those whose index along one dimension is `number` modulo `one_in`.

    The dimension is the longest of those before the last, so that rows stay whole and contiguous; the last one where
    no other is as long as `one_in`, as in a vector. Where even that is shorter, one index of it is taken. Tensors of
    up to WHOLE_ELEMENTS elements are selected whole. All of this depends on the whole tensor's shape only, and so is
    the same on both sides.
    """

    number: int = 0
    one_in: int = 1

    def __post_init__(self) -> None:
        if self.one_in < 1:
            raise ValueError(f"one row in {self.one_in} is no sample: one_in must be at least 1")

    @classmethod
    def full(cls) -> Selection:
        return cls()

    @classmethod
    def sample(cls, number: int, one_in: int = 64) -> Selection:
        """number  of the update: `one_in` updates one after the other see every element."""
        return cls(number, one_in)

    def narrow(self, shape: tuple[int, ...], region: Region) -> Narrowed | None:
        """The part of a region of a tensor of `shape` that is selected; None if nothing is."""
        everything = tuple(slice(None) for _ in shape)
        if self.one_in == 1 or math.prod(shape) <= WHOLE_ELEMENTS:
            return Narrowed(region, everything)
        dim = self._dimension(shape)
        modulus = min(self.one_in, shape[dim])
        start, count, step = region.start[dim], region.count[dim], region.step[dim]
        # start + i * step is number modulo modulus for i = first, first + period, ...
        wanted = (self.number - start) % modulus
        common = math.gcd(step, modulus)
        if wanted % common:
            return None
        period = modulus // common
        first = wanted // common * pow(step // common, -1, period) % period
        if first >= count:
            return None
        slices = (*everything[:dim], slice(first, None, period), *everything[dim + 1 :])
        return Narrowed(
            Region(
                (*region.start[:dim], start + first * step, *region.start[dim + 1 :]),
                (*region.count[:dim], (count - 1 - first) // period + 1, *region.count[dim + 1 :]),
                (*region.step[:dim], step * period, *region.step[dim + 1 :]),
            ),
            slices,
        )

    def _dimension(self, shape: tuple[int, ...]) -> int:
        last = len(shape) - 1
        longest = max(range(last), key=lambda d: shape[d], default=last)
        if shape[longest] >= self.one_in:
            return longest
        return max(longest, last, key=lambda d: shape[d])
