"""The trainer rank's side of a digest: what its own shards add to the digests that engine ranks must have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.digest.coefficients import of_tensors
from sglang_reshard.digest.regions import RegionKind, RegionSet, group_of, groups_of
from sglang_reshard.digest.selection import Selection
from sglang_reshard.digest.sums import Extent, RegionBatch
from sglang_reshard.digest.whole_model import weights_of_regions
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import ITEM_BYTES, Box, Region
from sglang_reshard.layout.shard_map import Shard
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import TensorIndex
from sglang_reshard.plan.tensor_index import TensorClass

_VERSIONS = "Do trainer and engine run the same version of this package?"


class PartialChecksums(NamedTuple):
    """What one trainer rank's shards add to digests.

    digests  of each engine rank: uint64 [engine ranks, groups]
    whole    of the whole model, see `digest.whole`; None of a sample, and where it has none
    """

    digests: np.ndarray
    whole: int | None


class SourceChecksums:
    """One trainer rank's part of the digests of all engine ranks' claims. Holds views of its shards, no bytes.

    shards  in the layout's order, see `TrainerState`
    claims  one for each engine rank

    An element is counted by one of the trainer ranks that hold it, so that the parts of all trainer ranks add up
    (modulo 2^64) to the digests that the engine ranks have. Which rank that is depends on the tensor, and so
    those that hold replicas share the work. What several engine ranks claim alike is looked at once.

    Raises Mismatch where an engine rank claims what the layout does not have.
    """

    def __init__(
        self, layout: SourceLayout, shards: Sequence[torch.Tensor], trainer_rank: int, claims: Sequence[RegionSet]
    ) -> None:
        catalog = TensorIndex.of(layout)
        self._tensors = len(layout.tensors)
        self._of_engine_rank: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        ways: dict[tuple[str, Region], int] = {}
        rows: dict[tuple[int, int], int] = {}  # by tensor and way in which some engine rank keeps it
        for engine_rank, own in enumerate(claims):
            _check(own, engine_rank, catalog)
            way_of = [ways.setdefault((kept.dtype, kept.region), len(ways)) for kept in own.kinds]
            tensors, kept = own.columns()
            pairs = zip(tensors.tolist(), kept.tolist(), strict=True)
            of_claim = np.array([rows.setdefault((t, way_of[k]), len(rows)) for t, k in pairs], np.int64)
            weights = of_tensors(tensors) * np.array([kept.places for kept in own.kinds], np.uint64)[kept]
            self._of_engine_rank.append((of_claim, group_of(tensors, self._tensors), weights))
        self._rows = len(rows)
        self._series = RegionBatch()
        numbers = np.array(list(rows), np.int64).reshape(-1, 2)
        self._whole = weights_of_regions(catalog, numbers[:, 0], numbers[:, 1], list(ways))
        shares = _Shares(catalog, list(ways), trainer_rank)
        for (tensor, way), row in rows.items():
            for extent, slices in shares.of(tensor, way):
                self._series.add(extent, shards[tensor][slices], row)

    def part(self, selection: Selection) -> PartialChecksums:
        """Of what the shards hold now."""
        found = np.zeros((len(self._of_engine_rank), groups_of(self._tensors)), np.uint64)
        own = self._series.digests(self._rows, selection)
        for of_rank, (rows, group, weights) in zip(found, self._of_engine_rank, strict=True):
            np.add.at(of_rank, group, own[rows] * weights)
        whole = None
        if self._whole is not None and selection == Selection.full():
            whole = int((own * self._whole).sum(dtype=np.uint64))
        return PartialChecksums(found, whole)

    def digests(self, selection: Selection) -> np.ndarray:
        """uint64 [engine ranks, groups], of what the shards hold now."""
        return self.part(selection).digests


_Share = list[tuple[Extent, tuple[slice, ...]]]


class _Shares:
    """What a trainer rank counts of tensors that are kept in some way. Of like tensors it is worked out once."""

    def __init__(self, catalog: TensorIndex, ways: Sequence[tuple[str, Region]], trainer_rank: int) -> None:
        self._catalog, self._ways, self._rank = catalog, ways, trainer_rank
        self._known: dict[tuple[int, int, int], _Share] = {}
        self._kind_of = catalog.kind_of.tolist()
        self._turn_of = (of_tensors(np.arange(len(self._kind_of))) >> np.uint64(32)).tolist()
        self._turns = [math.lcm(*(len(piece.ranks) for piece in kind.holdings.pieces)) for kind in catalog.kinds]

    def of(self, tensor: int, way: int) -> _Share:
        """(elements, where they are in this rank's local tensor)."""
        kind = self._kind_of[tensor]
        key = kind, way, self._turn_of[tensor] % self._turns[kind]
        if key not in self._known:
            self._known[key] = self._cut(self._catalog.kinds[kind], *self._ways[way], key[-1])
        return self._known[key]

    def _cut(self, kind: TensorClass, dtype: str, region: Region, turn: int) -> _Share:
        found = []
        for piece in _once(kind.holdings.pieces):
            if piece.ranks[turn % len(piece.ranks)] == self._rank and (common := region.intersect(piece.box)):
                extent = Extent.of(kind.shape, common[0], getattr(torch, dtype), dtype != kind.dtype)
                found.append((extent, piece.in_shard(common[0]).slices()))
        return found


def _once(pieces: Sequence[Shard]) -> list[Shard]:
    """The first piece of each box."""
    first: dict[Box, Shard] = {}
    for piece in pieces:
        first.setdefault(piece.box, piece)
    return list(first.values())


def _check(claims: RegionSet, engine_rank: int, catalog: TensorIndex) -> None:
    """Raise Mismatch unless all of it is in the layout: claims come from another process."""
    whole = len(claims.tensors) == len(claims.kept) and len(claims.kept) % 4 == 0
    tensors, kept = claims.columns() if whole else (np.full(1, -1), np.full(1, -1))
    if not (_below(tensors, len(catalog.kind_of)) and _below(kept, len(claims.kinds))):
        raise Mismatch(
            f"engine rank {engine_rank} claims to keep tensors that the trainer's layout does not have. {_VERSIONS}"
        )
    pairs, firsts = np.unique(np.stack([catalog.kind_of[tensors], kept]), axis=1, return_index=True)
    for (kind, number), first in zip(pairs.T.tolist(), firsts.tolist(), strict=True):
        if not _fits(claims.kinds[number], catalog.kinds[kind]):
            tensor = catalog.layout.tensors[tensors[first]]
            raise Mismatch(
                f"engine rank {engine_rank} claims to keep {claims.kinds[number]} of {tensor.name}, which is "
                f"{tensor.dtype} {tensor.shape} in the trainer's layout. {_VERSIONS}"
            )

    if not all(map(_counts, claims.kinds)):  # those that no claim is of, too
        raise Mismatch(f"engine rank {engine_rank} claims to keep elements in no number of places. {_VERSIONS}")


def _counts(kept: RegionKind) -> bool:
    return 1 <= kept.places < 1 << 31


def _below(numbers: np.ndarray, end: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < end)


def _fits(kept: RegionKind, kind: TensorClass) -> bool:
    if kept.dtype not in ITEM_BYTES or not _counts(kept):
        return False
    if not len(kept.start) == len(kept.count) == len(kept.step) == len(kind.shape):
        return False
    dims = zip(kept.start, kept.count, kept.step, kind.shape, strict=True)
    return all(a >= 0 and n >= 1 and s >= 1 and a + (n - 1) * s < length for a, n, s, length in dims)
