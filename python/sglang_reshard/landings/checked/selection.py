"""Selects the elements that a checksum covers: all, or some rows of every tensor, others in every update.

Sent from engine ranks to trainer ranks; without torch.
"""

from __future__ import annotations

import math

import msgspec

from sglang_reshard.layout.regions import Region

WHOLE_ELEMENTS = 4096  # tensors of up to so many elements are never sampled


class Selection(msgspec.Struct, frozen=True, array_like=True):
    """All elements if `one_in` is 1; else those whose index along one dimension is `number` modulo `one_in`.

    The dimension is the longest before the last, so that rows stay whole and contiguous. It is the last one if no other
    is as long as `one_in`, as in a vector; if that is shorter, too, one index of it is selected. Tensors of up to
    WHOLE_ELEMENTS elements are selected whole. All of this depends on the whole tensor's shape only, so that trainer
    and engine ranks select the same elements.
    """

    number: int = 0
    one_in: int = 1

    def __post_init__(self) -> None:
        if self.one_in < 1:
            raise ValueError(f"one_in must be at least 1, not {self.one_in}")

    @classmethod
    def full(cls) -> Selection:
        return cls()

    @classmethod
    def sample(cls, number: int, one_in: int = 64) -> Selection:
        """number: of the update. `one_in` consecutive updates cover every element."""
        return cls(number, one_in)

    def narrow(self, shape: tuple[int, ...], region: Region) -> tuple[Region, tuple[slice, ...]] | None:
        """Returns the selected part of a region of a tensor of `shape`, and its index in a view of the region.

        None if no element is selected.
        """
        everything = tuple(slice(None) for _ in shape)
        if self.one_in == 1 or math.prod(shape) <= WHOLE_ELEMENTS:
            return region, everything
        dim = self._dimension(shape)
        modulus = min(self.one_in, shape[dim])
        start, count, step = region.start[dim], region.count[dim], region.step[dim]
        # start + i * step equals number modulo modulus for i = first, first + period, ...
        wanted = (self.number - start) % modulus
        common = math.gcd(step, modulus)
        if wanted % common:
            return None
        period = modulus // common
        first = wanted // common * pow(step // common, -1, period) % period
        if first >= count:
            return None
        selected = Region(
            (*region.start[:dim], start + first * step, *region.start[dim + 1 :]),
            (*region.count[:dim], (count - 1 - first) // period + 1, *region.count[dim + 1 :]),
            (*region.step[:dim], step * period, *region.step[dim + 1 :]),
        )
        return selected, (*everything[:dim], slice(first, None, period), *everything[dim + 1 :])

    def _dimension(self, shape: tuple[int, ...]) -> int:
        last = len(shape) - 1
        longest = max(range(last), key=lambda d: shape[d], default=last)
        if shape[longest] >= self.one_in:
            return longest
        return max(longest, last, key=lambda d: shape[d])
