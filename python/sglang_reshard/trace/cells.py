"""Cells of a grid over a storage, on which it is counted how many views have an element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_reshard.trace.geometry import Geometry, IndexMap, TooFragmented, grid_shape, to_boxes

_MAX_CELLS = 50_000_000

Place = tuple[slice, ...]


class Cells:
    """A grid that is cut along each dimension where a box of any view begins or ends.

    places  of each view: where its boxes are in an array of the cells
    """

    def __init__(self, numel: int, views: Sequence[Geometry]) -> None:
        """`numel`: of the storage. Raises TooFragmented."""
        maps = [IndexMap.flattening(view).simplified() for view in views]
        grid = grid_shape(numel, {loop.read for index_map in maps for loop in index_map.loops})
        boxes = [to_boxes(index_map, grid, unit_steps=True) for index_map in maps]
        edges: list[set[int]] = [{0, n} for n in grid]
        for box in (box for found in boxes for box in found):
            for d, (a, n) in enumerate(zip(box.start, box.size, strict=True)):
                edges[d].update((a, a + n))
        ordered = [sorted(e) for e in edges]
        index = [{x: i for i, x in enumerate(e)} for e in ordered]
        self._lengths = [np.diff(np.array(e, dtype=np.int64)) for e in ordered]
        if np.prod([len(n) for n in self._lengths], dtype=np.float64) > _MAX_CELLS:
            raise TooFragmented
        self.places: list[list[Place]] = [
            [tuple(slice(i[a], i[a + n]) for i, a, n in zip(index, box.start, box.size, strict=True)) for box in found]
            for found in boxes
        ]

    def counts(self, views: Sequence[Sequence[Place]]) -> np.ndarray:
        """Returns how many of these views have each cell."""
        counts = np.zeros([len(n) for n in self._lengths], dtype=np.int32)
        for at in (at for places in views for at in places):
            counts[at] += 1
        return counts

    def volume(self, chosen: np.ndarray, at: Place) -> int:
        """Returns the number of elements in the chosen cells of a part of the grid."""
        if not chosen.any():
            return 0
        volumes = np.ones((), dtype=np.int64)
        for lengths, part in zip(self._lengths, at, strict=True):
            volumes = np.multiply.outer(volumes, lengths[part])
        return int(volumes[chosen].sum())
