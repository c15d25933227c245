"""Copies of many boxes as few: those that follow each other at equal distances, on both sides, are one strided copy.

The experts of a layer are such boxes: stacked in the engine's memory, and one after the other in the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

_PERIODS = (1, 2, 3, 4)  # gate and up projections take turns in a stack, at two distances


class StridedCopy(NamedTuple):
    """Elements of one memory that go to another's: `size` of them along each dimension.

    to, source   name the two memories, each counted in elements of its dtype
    dtype        of the source
    """

    to: str
    to_offset: int
    to_strides: tuple[int, ...]
    source: tuple[int, int]
    offset: int
    strides: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str


def merge_strided(strips: Iterable[StridedCopy]) -> list[StridedCopy]:
    """The same copies, in no order, as fewer strips where that is possible."""
    alike: dict[tuple[object, ...], list[StridedCopy]] = {}
    for strip in strips:
        key = strip.to, strip.to_strides, strip.source, strip.strides, strip.size, strip.dtype
        alike.setdefault(key, []).append(strip)
    found: list[StridedCopy] = []
    for group in alike.values():
        found += _series(sorted(group))
    return found


def _series(strips: list[StridedCopy]) -> list[StridedCopy]:
    """Strips that differ in their offsets only, ascending."""
    offsets = np.array([(s.to_offset, s.offset) for s in strips], np.int64)
    for period in _PERIODS:
        parts = [offsets[first::period] for first in range(period)]
        if len(strips) > 2 * period and all(_is_even(part) for part in parts):
            return [_one(strips[first], part) for first, part in enumerate(parts)]
    return strips


def _is_even(offsets: np.ndarray) -> bool:
    steps = np.diff(offsets, axis=0)
    return bool((steps == steps[:1]).all()) and bool((steps[:1] > 0).all())


def _one(first: StridedCopy, offsets: np.ndarray) -> StridedCopy:
    to_step, step = (int(n) for n in offsets[1] - offsets[0])
    return first._replace(
        to_strides=(to_step, *first.to_strides), strides=(step, *first.strides), size=(len(offsets), *first.size)
    )
