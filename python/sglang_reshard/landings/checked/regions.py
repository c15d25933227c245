"""Lists what checksums cover: the regions of the checkpoint that an engine rank keeps, and the elements of a sample.

Sent from engine ranks to trainer ranks; without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import numpy as np

from sglang_reshard.layout.regions import Region

MAX_GROUPS = 4096  # checksums per engine rank


class RegionKind(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A region of a tensor. dtype: the engine's. copies: how often the engine rank keeps the same elements."""

    dtype: str
    region: Region
    copies: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1


class RegionSet(msgspec.Struct, frozen=True):
    """All regions that one engine rank keeps. No two have the same tensor, dtype and region.

    kinds             ascending; thousands of tensors are kept alike
    tensors, kind_of  of each region: the number of its tensor in the layout, and of its kind. Little-endian int32,
                      ascending
    """

    kinds: tuple[RegionKind, ...]
    tensors: bytes
    kind_of: bytes

    @classmethod
    def of(cls, regions: Iterable[tuple[int, RegionKind]]) -> RegionSet:
        """Builds the set from (tensor number, kind) pairs, all distinct, in any order."""
        pairs = list(regions)
        kinds = tuple(sorted({kind for _, kind in pairs}))
        number = {kind: i for i, kind in enumerate(kinds)}
        tensors = np.fromiter((tensor for tensor, _ in pairs), "<i4", len(pairs))
        kind_of = np.fromiter((number[kind] for _, kind in pairs), "<i4", len(pairs))
        order = np.lexsort((kind_of, tensors))
        return cls(kinds, tensors[order].tobytes(), kind_of[order].tobytes())

    def __len__(self) -> int:
        return len(self.tensors) // 4

    def __iter__(self) -> Iterator[tuple[int, RegionKind]]:
        tensors, kind_of = (column.tolist() for column in self.columns())
        return ((tensor, self.kinds[number]) for tensor, number in zip(tensors, kind_of, strict=True))

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each region's tensor number and kind number."""
        return np.frombuffer(self.tensors, "<i4"), np.frombuffer(self.kind_of, "<i4")


def num_groups(tensors: int) -> int:
    """Returns the number of checksums for a layout of so many tensors."""
    return min(MAX_GROUPS, tensors)


def groups_of(numbers: np.ndarray, tensors: int) -> np.ndarray:
    """Returns the group of each tensor number. Tensors of one group follow each other."""
    return numbers.astype(np.int64) * num_groups(tensors) // max(1, tensors)


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
