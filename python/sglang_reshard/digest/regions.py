"""What an engine rank keeps of a checkpoint: the regions that trainer ranks are to vouch for. Without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from sglang_reshard.layout.regions import Region

GROUPS = 4096  # numbers that a rank's digests are folded into, at the most


class RegionKind(msgspec.Struct, frozen=True, array_like=True, order=True):
    """How a tensor is kept. dtype: the engine's. places: in how many places the same elements are."""

    dtype: str
    start: tuple[int, ...]
    count: tuple[int, ...]
    step: tuple[int, ...]
    places: int = 1

    @property
    def region(self) -> Region:
        return Region(self.start, self.count, self.step)


class RegionCount(msgspec.Struct, frozen=True, array_like=True):
    """An engine rank keeps these elements of the layout's tensor number `tensor`."""

    tensor: int
    kept: RegionKind


class RegionSet(msgspec.Struct, frozen=True):
    """All that one engine rank claims. No two claims have the same tensor, dtype and region.

    kinds           ascending; thousands of tensors are kept alike
    tensors, kept   a number for each claim, int32 and little-endian: of the layout's tensor, and of the kind.
                    Ascending
    """

    kinds: tuple[RegionKind, ...]
    tensors: bytes
    kept: bytes

    @classmethod
    def of(cls, claims: Iterable[RegionCount]) -> RegionSet:
        """From claims in any order, none of them twice."""
        given = list(claims)
        kinds = tuple(sorted({claim.kept for claim in given}))
        number = {kind: i for i, kind in enumerate(kinds)}
        tensors = np.fromiter((claim.tensor for claim in given), "<i4", len(given))
        kept = np.fromiter((number[claim.kept] for claim in given), "<i4", len(given))
        order = np.lexsort((kept, tensors))
        return cls(kinds, tensors[order].tobytes(), kept[order].tobytes())

    def __len__(self) -> int:
        return len(self.tensors) // 4

    def __iter__(self) -> Iterator[RegionCount]:
        tensors, kept = (column.tolist() for column in self.columns())
        return (RegionCount(tensor, self.kinds[number]) for tensor, number in zip(tensors, kept, strict=True))

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Each claim's tensor and kind."""
        return np.frombuffer(self.tensors, "<i4"), np.frombuffer(self.kept, "<i4")

    @property
    def digest(self) -> str:
        """Content hash, the same for equal claims."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


def groups_of(tensors: int) -> int:
    """Into how many numbers the digests of a layout of so many tensors are folded."""
    return min(GROUPS, tensors)


def group_of(numbers: np.ndarray, tensors: int) -> np.ndarray:
    """The group of each tensor number: tensors that follow each other share one, if any do."""
    return numbers.astype(np.int64) * groups_of(tensors) // max(1, tensors)
