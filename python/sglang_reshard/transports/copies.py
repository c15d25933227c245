"""Lists of tensor copies that run in one call, and the merging of many small ones into few strided ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

_PERIODS = (1, 2, 3, 4)  # gate and up projections alternate in a fused tensor, at two distances


class CopyList:
    """Pairs of views, copied in one call. Casts where dtypes differ."""

    def __init__(self) -> None:
        self._destinations: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._destinations.append(destination)
        self._sources.append(source)

    def run(self) -> None:
        if self._destinations:
            with torch.inference_mode():  # a quarter faster than no_grad for thousands of small boxes
                torch._foreach_copy_(self._destinations, self._sources)


class StridedCopy(NamedTuple):
    """A copy of `size` elements along each dimension, from one block of memory to another.

    target  name of the parameter written to; its offset and strides are in elements of its dtype
    source  trainer rank and mapping read from; its offset and strides are in elements of `dtype`
    """

    target: str
    target_offset: int
    target_strides: tuple[int, ...]
    source: tuple[int, int]
    source_offset: int
    source_strides: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str


def merge_strided(copies: Iterable[StridedCopy]) -> list[StridedCopy]:
    """Returns fewer copies of the same elements, in any order.

    Copies at equal distances on both sides become one with one more dimension. The experts of a layer are such
    copies: fused in the engine's memory, one after the other in the trainer's.
    """
    alike: dict[tuple[object, ...], list[StridedCopy]] = {}
    for copy in copies:
        key = copy.target, copy.target_strides, copy.source, copy.source_strides, copy.size, copy.dtype
        alike.setdefault(key, []).append(copy)
    merged: list[StridedCopy] = []
    for group in alike.values():
        merged += _merge_series(sorted(group))
    return merged


def _merge_series(copies: list[StridedCopy]) -> list[StridedCopy]:
    """Merges copies that differ in their offsets only, given in ascending order."""
    offsets = np.array([(c.target_offset, c.source_offset) for c in copies], np.int64)
    for period in _PERIODS:
        series = [offsets[first::period] for first in range(period)]
        if len(copies) > 2 * period and all(_is_equidistant(each) for each in series):
            return [_merged(copies[first], each) for first, each in enumerate(series)]
    return copies


def _is_equidistant(offsets: np.ndarray) -> bool:
    steps = np.diff(offsets, axis=0)
    return bool((steps == steps[:1]).all()) and bool((steps[:1] > 0).all())


def _merged(first: StridedCopy, offsets: np.ndarray) -> StridedCopy:
    target_step, source_step = (int(n) for n in offsets[1] - offsets[0])
    return first._replace(
        target_strides=(target_step, *first.target_strides),
        source_strides=(source_step, *first.source_strides),
        size=(len(offsets), *first.size),
    )
