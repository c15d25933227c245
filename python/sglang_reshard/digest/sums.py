"""Digests of views of tensors: chunk by chunk, on the device where the views are.

A CPU's chunk is as large as its cache likes. On another device nothing waits for anything but the last line of
`RegionBatch.digests`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.digest.bits import readable, units
from sglang_reshard.digest.coefficients import MODULUS, of_columns, of_rows, total
from sglang_reshard.digest.selection import Selection
from sglang_reshard.layout.regions import Box, Region, split

_ALL = slice(None)
CHUNK = 1 << 18  # elements looked at together by a CPU
DEVICE_CHUNK = 1 << 22  # by another device, which takes a while to be told anything


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements of a checkpoint tensor, as an engine keeps them.

    shape   of the whole tensor; a scalar counts as a vector of one element
    cast    whether an update converts them from another dtype
    """

    shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    cast: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], region: Region, dtype: torch.dtype, cast: bool) -> Extent:
        return cls(shape, region, dtype, cast) if shape else cls((1,), Region((0,), (1,), (1,)), dtype, cast)


class RegionBatch:
    """Views of many tensors, those together that are of the same extent. Holds the views, no bytes of its own."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Extent, torch.dtype, torch.device], tuple[list[torch.Tensor], list[int]]] = {}

    def add(self, extent: Extent, view: torch.Tensor, row: int) -> None:
        """`view`, whose elements are the extent's (perhaps not cast yet), counts for number `row` of the result."""
        views, rows = self._alike.setdefault((extent, view.dtype, view.device), ([], []))
        views.append(readable(view.detach().view(extent.region.count), extent.cast))
        rows.append(row)

    def digests(self, rows: int, selection: Selection) -> np.ndarray:
        """uint64 [rows]: for each, the sum of the digests of its views' selected elements, as they are now."""
        totals = _Totals(rows)
        for (extent, _, device), (views, own) in self._alike.items():
            narrowed = selection.narrow(extent.shape, extent.region)
            if narrowed is None:
                continue
            selected = replace(extent, region=narrowed.region)
            for batch in _batches(selected, len(views), CHUNK if device.type == "cpu" else DEVICE_CHUNK):
                now = slice(batch.first, batch.last)
                given = _cut(_cut(views[now], narrowed.slices), batch.slices)
                totals.add(own[now], *_digests(given, batch.extent))
        return totals.found()


def _cut(views: list[torch.Tensor], slices: tuple[slice, ...]) -> list[torch.Tensor]:
    """Slices of each view. Nearly all are of the first dimension, or of none, and then cost less when they say so."""
    few = len(slices)
    while few and slices[few - 1] == _ALL:
        few -= 1
    index = slices[0] if few == 1 else slices[:few]
    return [view[index] for view in views] if few else views


class _Totals:
    """Adds up digests by row; those of other devices are fetched at the end."""

    def __init__(self, rows: int) -> None:
        self._found = np.zeros(rows, np.uint64)
        self._away: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}

    def add(self, rows: list[int], counted: int, sums: torch.Tensor) -> None:
        """sums: int64 [rows], and `counted` is added to each."""
        np.add.at(self._found, rows, np.uint64(counted))
        if sums.device.type == "cpu":
            np.add.at(self._found, rows, sums.numpy().view(np.uint64))
        else:
            numbers, parts = self._away.setdefault(sums.device, ([], []))
            numbers += rows
            parts.append(sums)

    def found(self) -> np.ndarray:
        for rows, parts in self._away.values():
            np.add.at(self._found, rows, torch.cat(parts).cpu().numpy().view(np.uint64))
        return self._found


class _Batch(NamedTuple):
    """From the first to before the last view, `slices` of each, which is `extent`."""

    first: int
    last: int
    extent: Extent
    slices: tuple[slice, ...]


def _batches(extent: Extent, views: int, chunk: int) -> Iterator[_Batch]:
    """All elements of all views, at most `chunk` at a time: many small views together, parts of a large one."""
    region = extent.region
    if region.numel <= chunk:
        together = chunk // max(1, region.numel)
        for first in range(0, views if region.numel else 0, together):
            yield _Batch(first, min(first + together, views), extent, ())
        return
    for box in split(Box.whole(region.count), chunk):
        start = tuple(a + b * s for a, b, s in zip(region.start, box.start, region.step, strict=True))
        part = replace(extent, region=Region(start, box.shape, region.step))
        for number in range(views):
            yield _Batch(number, number + 1, part, box.slices())


def _digests(views: Sequence[torch.Tensor], extent: Extent) -> tuple[int, torch.Tensor]:
    """What to add for each view because its elements are there, and the sums of their bits: int64 [views]."""
    region = extent.region
    rows = of_rows(extent.shape, region)
    columns = of_columns(region.start[-1], region.count[-1], region.step[-1], extent.dtype.itemsize)
    bits = units(views, extent.dtype, extent.cast, columns.packed)
    folded = _on_cpu if bits.device.type == "cpu" else _on_device
    return total(rows) * columns.total % MODULUS, folded(bits, rows, columns.weights)


def _on_cpu(bits: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """By numpy: its einsum is quicker for integers than its own or torch's matrix products."""
    unsigned = bits.numpy().view(f"u{bits.element_size()}").reshape(-1, len(columns))
    by_row = _of_pairs(unsigned, columns)
    if by_row is None:
        by_row = np.einsum("ij,j->i", unsigned.astype(np.uint64), columns)
    return torch.from_numpy(np.einsum("ij,j->i", by_row.reshape(-1, len(rows)), rows).view(np.int64))


def _of_pairs(words: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """The same two words at a time, a fifth quicker than to widen each; None where they do not lie so.

    With a pair p = low + high * 2^32: low * a + high * b == p * a + high * (b - a * 2^32), modulo 2^64.
    """
    if words.itemsize != 4 or len(columns) % 2 or words.strides[-1] != 4:
        return None
    pairs = words.view(np.uint64)
    if not pairs.flags.aligned:
        return None
    low = np.ascontiguousarray(columns[0::2])
    high = columns[1::2] - (low << np.uint64(32))
    return np.einsum("ij,j->i", pairs, low) + np.einsum("ij,j->i", pairs >> np.uint64(32), high)


def _on_device(bits: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """By torch, with 64-bit integers that wrap around."""
    there = [torch.from_numpy(w.view(np.int64).copy()).to(bits.device, non_blocking=True) for w in (rows, columns)]
    wide = bits.to(torch.int64).bitwise_and_((1 << 8 * bits.element_size()) - 1)  # without the sign
    by_row = wide.mul_(there[1]).sum(-1)
    return by_row.reshape(-1, len(rows)).mul_(there[0]).sum(-1)
