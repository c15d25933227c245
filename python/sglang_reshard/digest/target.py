"""The engine rank's side of a digest: what it claims to keep, and the digests of its live memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from sglang_reshard.digest.coefficients import of_tensors
from sglang_reshard.digest.regions import RegionCount, RegionKind, RegionSet, group_of, groups_of
from sglang_reshard.digest.selection import Selection
from sglang_reshard.digest.sums import Extent, RegionBatch
from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import TensorIndex
from sglang_reshard.trace import Copy, Program

_NAMED = 5


class TargetChecksums:
    """Digests of one engine rank's live memory, for its traced loader. Holds views of it, no bytes."""

    def __init__(self, catalog: TensorIndex, program: Program) -> None:
        self._names = [tensor.name for tensor in catalog.layout.tensors]
        places: dict[tuple[int, str, Region], list[Copy]] = {}
        for copy in program.copies:
            dtype = str(program.targets[copy.target].dtype).removeprefix("torch.")
            places.setdefault((catalog.index_of[copy.source], dtype, copy.region), []).append(copy)
        self.claims = RegionSet.of(
            RegionCount(tensor, RegionKind(dtype, region.start, region.count, region.step, len(copies)))
            for (tensor, dtype, region), copies in places.items()
        )
        self._series = RegionBatch()
        for row, claim in enumerate(self.claims):
            kept, kind = claim.kept, catalog.kind(claim.tensor)
            dtype = getattr(torch, kept.dtype)
            extent = Extent.of(kind.shape, kept.region, dtype, kept.dtype != kind.dtype)
            for copy in places[claim.tensor, kept.dtype, kept.region]:
                self._series.add(extent, copy.landing(program.targets[copy.target]), row)
        self._tensors, _ = self.claims.columns()
        self._group = group_of(self._tensors, len(self._names))

    def digests(self, selection: Selection) -> np.ndarray:
        """uint64 [groups], of what the live memory holds now.

        To be asked when all copies of an update have landed, and before its local steps run: those may write over
        what was copied.
        """
        found = np.zeros(groups_of(len(self._names)), np.uint64)
        own = self._series.digests(len(self.claims), selection)
        np.add.at(found, self._group, own * of_tensors(self._tensors))
        return found

    def explain(self, groups: Iterable[int]) -> str:
        """The names of the tensors that this rank keeps in groups which differ."""
        among = self._tensors[np.isin(self._group, list(groups))]
        names = [self._names[number] for number in np.unique(among).tolist()]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more
