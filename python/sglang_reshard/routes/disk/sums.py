"""Compares what engine ranks have read with the checksums of whole tensors.

Checksums add up (`landings.checked`): those of the distinct regions that all engine ranks read of a tensor are the
tensor's own, if the regions are its parts. Ranks that read the same region must have the same checksum. So every byte
that any rank has read is compared, and no rank reads more than it needs. Where regions of a tensor overlap, or leave
elements out, ranks compare it whole (`Verdict.open`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.checked.regions import RegionKind, RegionSet
from sglang_reshard.landings.checked.whole_model import digest_of_sums
from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import TensorIndex

_NO_DTYPE = ""  # the same elements may be kept in several


class RankSums(msgspec.Struct, frozen=True):
    """The regions that one engine rank has read.

    regions  of the tensors
    sums     checksum of each, little-endian uint64
    cast     some of them are converted on their way to the live weights
    """

    regions: RegionSet
    sums: bytes
    cast: bool

    @classmethod
    def of(cls, sums: Mapping[tuple[int, Region], int], cast: bool) -> RankSums:
        """`sums`: (tensor number, region) -> checksum."""
        regions = RegionSet.of((tensor, RegionKind(_NO_DTYPE, region)) for tensor, region in sums)
        ordered = [sums[tensor, kind.region] for tensor, kind in regions]
        return cls(regions, np.array(ordered, "<u8").tobytes(), cast)


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a comparison. Tensors by their numbers.

    wrong   those that have another checksum than the snapshot's, or whose ranks have read different bytes
    open    those whose regions overlap, or leave elements out
    digest  of all weights, see `landings.checked.whole_model`; empty if some are open, or are cast
    """

    wrong: tuple[int, ...]
    open: tuple[int, ...]
    digest: str


def compare(index: TensorIndex, expected: np.ndarray, of_ranks: Sequence[RankSums]) -> Verdict:
    """Compares all engine ranks' checksums with those of whole tensors, uint64 [tensors]."""
    kinds: dict[RegionKind, int] = {}
    keys, sums = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    columns = []
    for rank in of_ranks:
        number = np.array([kinds.setdefault(kind, len(kinds)) for kind in rank.regions.kinds], np.int64)
        tensors, kind_of = rank.regions.columns()
        if len(rank.sums) != 8 * len(tensors):
            raise Mismatch("an engine rank lists other checksums than regions. This is a bug; please report it")
        columns.append((tensors.astype(np.int64), number[kind_of] if len(kind_of) else kind_of.astype(np.int64)))
        sums.append(np.frombuffer(rank.sums, "<u8").astype(np.uint64))
    keys += [tensors * max(1, len(kinds)) + kind for tensors, kind in columns]
    key, found = np.concatenate(keys), np.concatenate(sums)
    distinct, first, of = np.unique(key, return_index=True, return_inverse=True)
    tensor, kind = distinct // max(1, len(kinds)), distinct % max(1, len(kinds))
    wrong = set(tensor[of[found != found[first][of]]].tolist())
    regions = [known.region for known in kinds]
    numel = np.array([region.numel for region in regions] or [0], np.int64)
    read, begins = np.unique(tensor, return_index=True)
    total = np.zeros(len(read), np.uint64)
    covered = np.zeros(len(read), np.int64)
    row = np.searchsorted(read, tensor)
    np.add.at(total, row, found[first])
    np.add.at(covered, row, numel[kind])
    shapes = [index.classes[number].shape for number in index.class_of[read].tolist()]
    whole = np.array([int(np.prod(shape, dtype=np.int64)) for shape in shapes], np.int64)
    parts = [tuple(part.tolist()) for part in np.split(kind, begins[1:])] if len(read) else []
    are_apart = lru_cache(None)(lambda numbers: _are_apart([regions[number] for number in numbers]))
    is_open = (covered != whole) | np.array([not are_apart(numbers) for numbers in parts], bool)
    differs = np.isin(read, list(wrong)) | (~is_open & (total != expected[read]))
    digest = ""
    if not (differs | is_open).any() and not any(rank.cast for rank in of_ranks):
        digest = digest_of_sums([index.layout.tensors[number].name for number in read.tolist()], expected[read])
    return Verdict(tuple(read[differs].tolist()), tuple(read[is_open & ~differs].tolist()), digest)


def _are_apart(regions: Sequence[Region]) -> bool:
    """Returns whether no two regions of a tensor have an element in common, as far as that is easily seen."""
    ordered = sorted(regions, key=lambda region: region.start)
    return all(_apart(a, b) for number, a in enumerate(ordered) for b in ordered[number + 1 :])


def _apart(a: Region, b: Region) -> bool:
    for start, count, step, other, others, by in zip(a.start, a.count, a.step, b.start, b.count, b.step, strict=True):
        if start + (count - 1) * step < other or other + (others - 1) * by < start:
            return True
        if step == by and (start - other) % step:
            return True
    return False
