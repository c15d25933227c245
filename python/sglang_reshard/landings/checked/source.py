"""Computes what one trainer rank's shards contribute to the checksums that engine ranks must have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.coefficients import tensor_coefficients
from sglang_reshard.landings.checked.regions import RegionKind, RegionSet, Selection, groups_of, num_groups
from sglang_reshard.landings.checked.whole_model import region_coefficients
from sglang_reshard.layout.regions import ITEM_BYTES, Box, LocalRegion, Region, is_within
from sglang_reshard.layout.shard_map import ShardBox
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import TensorIndex
from sglang_reshard.plan.tensor_index import TensorClass

_SAME_VERSION = "Run the same version of sglang-reshard on trainer and engine."


class PartialChecksums(msgspec.Struct, frozen=True):
    """One trainer rank's part of the checksums; the parts of all trainer ranks add up modulo 2^64.

    rows   checksums of the engine ranks that ask, little-endian uint64 [engine ranks, groups]
    model  of the whole model, see `whole_model`; None for a sample, and if the model has no digest
    """

    rows: bytes
    model: int | None


class SourceChecksums:
    """One trainer rank's part of the checksums of all engine ranks. Holds views of its shards, but no other memory.

    shards   in the layout's order, see `TrainerState`
    regions  that engine ranks keep, one set per engine rank

    An element is counted by one of the trainer ranks that hold it; which one depends on the tensor, so that ranks that
    hold replicas share the work. Regions that several engine ranks keep are read once.

    Raises Mismatch if an engine rank keeps regions that the layout does not have.
    """

    def __init__(
        self, layout: SourceLayout, shards: Sequence[torch.Tensor], trainer_rank: int, regions: Sequence[RegionSet]
    ) -> None:
        tensor_index = TensorIndex.of(layout)
        self._tensors = len(layout.tensors)
        self._of_engine_rank: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        views: dict[tuple[str, Region], int] = {}
        rows: dict[tuple[int, int], int] = {}  # by tensor and by how some engine rank views it
        for engine_rank, own in enumerate(regions):
            _check(own, engine_rank, tensor_index)
            view_of = [views.setdefault((kind.dtype, kind.region), len(views)) for kind in own.kinds]
            tensors, kinds = own.columns()
            pairs = zip(tensors.tolist(), kinds.tolist(), strict=True)
            own_rows = np.array([rows.setdefault((t, view_of[k]), len(rows)) for t, k in pairs], np.int64)
            factors = tensor_coefficients(tensors) * np.array([kind.copies for kind in own.kinds], np.uint64)[kinds]
            self._of_engine_rank.append((own_rows, groups_of(tensors, self._tensors), factors))
        self._num_rows = len(rows)
        self._batch = RegionBatch()
        numbers = np.array(list(rows), np.int64).reshape(-1, 2)
        self._model_factors = region_coefficients(tensor_index, numbers[:, 0], numbers[:, 1], list(views))
        shares = _Shares(tensor_index, list(views), trainer_rank)
        for (tensor, view), row in rows.items():
            for spec, region in shares.of(tensor, view):
                self._batch.add(spec, region.view(shards[tensor]), row)

    def compute(self, selection: Selection) -> PartialChecksums:
        """Returns the part for the current values of the shards."""
        found = np.zeros((len(self._of_engine_rank), num_groups(self._tensors)), np.uint64)
        own = self._batch.checksums(self._num_rows, selection)
        for of_rank, (rows, groups, factors) in zip(found, self._of_engine_rank, strict=True):
            np.add.at(of_rank, groups, own[rows] * factors)
        model = None
        if self._model_factors is not None and selection == Selection.full():
            model = int((own * self._model_factors).sum(dtype=np.uint64))
        return PartialChecksums(found.astype("<u8", copy=False).tobytes(), model)


_Share = list[tuple[RegionSpec, LocalRegion]]


class _Shares:
    """The parts of a viewed tensor that a trainer rank counts. Computes them once per tensor class."""

    def __init__(self, tensor_index: TensorIndex, views: Sequence[tuple[str, Region]], trainer_rank: int) -> None:
        self._index, self._views, self._rank = tensor_index, views, trainer_rank
        self._known: dict[tuple[int, int, int], _Share] = {}
        self._class_of = tensor_index.class_of.tolist()
        self._turn_of = (tensor_coefficients(np.arange(len(self._class_of))) >> np.uint64(32)).tolist()
        self._turns = [math.lcm(*(len(shard.ranks) for shard in c.shard_map.shards)) for c in tensor_index.classes]

    def of(self, tensor: int, view: int) -> _Share:
        """Returns (elements, where they are in this rank's local tensor) pairs."""
        number = self._class_of[tensor]
        key = number, view, self._turn_of[tensor] % self._turns[number]
        if key not in self._known:
            self._known[key] = self._compute(self._index.classes[number], *self._views[view], key[-1])
        return self._known[key]

    def _compute(self, of: TensorClass, dtype: str, region: Region, turn: int) -> _Share:
        first: dict[Box, ShardBox] = {}
        for shard in of.shard_map.shards:
            first.setdefault(shard.box, shard)
        found = []
        for shard in first.values():
            if shard.ranks[turn % len(shard.ranks)] == self._rank and (common := region.intersect(shard.box)):
                spec = RegionSpec.of(of.shape, common[0], getattr(torch, dtype), dtype != of.dtype)
                found.append((spec, of.shard_map.to_local(shard, common[0])))
        return found


def _check(regions: RegionSet, engine_rank: int, tensor_index: TensorIndex) -> None:
    """Raises Mismatch unless the layout has all regions, which come from another process."""
    complete = len(regions.tensors) == len(regions.kind_of) and len(regions.kind_of) % 4 == 0
    tensors, kinds = regions.columns() if complete else (np.full(1, -1), np.full(1, -1))
    if not (_are_below(tensors, len(tensor_index.class_of)) and _are_below(kinds, len(regions.kinds))):
        raise Mismatch(
            f"engine rank {engine_rank} requests checksums of tensors that are not in the trainer's layout. "
            f"{_SAME_VERSION}"
        )
    pairs, firsts = np.unique(np.stack([tensor_index.class_of[tensors], kinds]), axis=1, return_index=True)
    for (number, kind), first in zip(pairs.T.tolist(), firsts.tolist(), strict=True):
        if not _is_region_of(regions.kinds[kind], tensor_index.classes[number]):
            tensor = tensor_index.layout.tensors[tensors[first]]
            raise Mismatch(
                f"engine rank {engine_rank} requests a checksum of {tensor.name} as {regions.kinds[kind]}, but it is "
                f"{tensor.dtype} {tensor.shape} in the trainer's layout. {_SAME_VERSION}"
            )


def _are_below(numbers: np.ndarray, end: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < end)


def _is_region_of(kind: RegionKind, of: TensorClass) -> bool:
    return kind.dtype in ITEM_BYTES and is_within(kind.start, kind.count, kind.step, of.shape)
