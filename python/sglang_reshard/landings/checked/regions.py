"""Lists the regions of the checkpoint that an engine rank keeps; it requests the trainer's checksums of them.

Sent from engine ranks to trainer ranks; without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from sglang_reshard.layout.regions import Region

MAX_GROUPS = 4096  # checksums per engine rank


class RegionKind(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A region of a tensor. dtype: the engine's. copies: how often the engine rank keeps the same elements."""

    dtype: str
    start: tuple[int, ...]
    count: tuple[int, ...]
    step: tuple[int, ...]
    copies: int = 1

    @property
    def region(self) -> Region:
        return Region(self.start, self.count, self.step)


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
