"""Computes checksums of views of tensors, on the device of the views.

On a GPU a kernel reads all views that are alike (`kernel_sums`), and nothing is synchronized before the end of
`RegionBatch.checksums`. On a CPU, and without Triton, they are read chunk by chunk; a CPU's chunk fits its cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.landings.checked.coefficients import (
    MODULUS,
    WORD_BYTES,
    ColumnCoefficients,
    column_coefficients,
    row_coefficients,
    total,
)
from sglang_reshard.landings.checked.kernel_sums import kernel_sums
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.layout.regions import Box, Region, split

_ALL = slice(None)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
CHUNK = 1 << 18  # elements that a CPU reads together
DEVICE_CHUNK = 1 << 22  # elements that another device, whose kernels take longer to launch, reads together


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """Elements of a checkpoint tensor, as an engine keeps them.

    shape   of the whole tensor; a scalar counts as a vector of one element
    dtype   the engine's
    cast    True if an update converts them from another dtype
    """

    shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    cast: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], region: Region, dtype: torch.dtype, cast: bool) -> RegionSpec:
        return cls(shape, region, dtype, cast) if shape else cls((1,), Region((0,), (1,), (1,)), dtype, cast)

    @classmethod
    def bits(cls, shape: tuple[int, ...], region: Region, item_bytes: int) -> RegionSpec:
        """Returns elements of `item_bytes` as they are. Their views have the dtype of the result."""
        return cls.of(shape, region, _INTEGERS[item_bytes], cast=False)


_Alike = tuple[RegionSpec, torch.dtype, torch.device, tuple[int, ...]]  # and strides


class RegionBatch:
    """Views of many tensors, grouped by their base. Holds the views, but no other memory."""

    def __init__(self) -> None:
        self._alike: dict[_Alike, tuple[list[torch.Tensor], list[int]]] = {}

    def add(self, spec: RegionSpec, view: torch.Tensor, row: int) -> None:
        """Adds a view of the elements of `spec`, cast or not, to those whose sum is number `row` of the result."""
        view = readable(view.detach().view(spec.region.count), spec.cast)
        views, rows = self._alike.setdefault((spec, view.dtype, view.device, view.stride()), ([], []))
        views.append(view)
        rows.append(row)

    def checksums(self, rows: int, selection: Selection) -> np.ndarray:
        """Returns uint64 [rows]: the sums over the selected elements of the views, as they are now."""
        found = np.zeros(rows, np.uint64)
        on_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for (spec, _, device, _), (views, own) in self._alike.items():
            narrowed = selection.narrow(spec.shape, spec.region)
            if narrowed is None or not narrowed[0].numel:
                continue
            for now, counted, sums in _sums(_sliced(views, narrowed[1]), replace(spec, region=narrowed[0])):
                np.add.at(found, own[now], np.uint64(counted))
                if device.type == "cpu":
                    np.add.at(found, own[now], sums.numpy().view(np.uint64))
                else:
                    numbers, parts = on_device.setdefault(device, ([], []))
                    numbers += own[now]
                    parts.append(sums)
        for numbers, parts in on_device.values():
            np.add.at(found, numbers, torch.cat(parts).cpu().numpy().view(np.uint64))
        return found


def _sums(views: list[torch.Tensor], spec: RegionSpec) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Yields some of the views, what the elements of each contribute by their number, and by their bits: int64."""
    device = views[0].device
    if runtime().is_gpu(device):
        rows, columns = _coefficients(spec)
        sums = kernel_sums(views, spec.dtype if spec.cast else None, rows, columns)
        if sums is not None:
            yield slice(None), _counted(rows, columns), sums
            return
    for now, part, cut in _chunks(spec, len(views), CHUNK if device.type == "cpu" else DEVICE_CHUNK):
        rows, columns = _coefficients(part)
        bits = units(_sliced(views[now], cut), part.dtype, part.cast, columns.packed)
        yield now, _counted(rows, columns), sum_words(bits, rows, columns.values)


def _coefficients(spec: RegionSpec) -> tuple[np.ndarray, ColumnCoefficients]:
    """Returns those of a region's rows and columns."""
    region = spec.region
    columns = column_coefficients(region.start[-1], region.count[-1], region.step[-1], spec.dtype.itemsize)
    return row_coefficients(spec.shape, region), columns


def _counted(rows: np.ndarray, columns: ColumnCoefficients) -> int:
    return total(rows) * columns.total % MODULUS


def _sliced(views: list[torch.Tensor], slices: tuple[slice, ...]) -> list[torch.Tensor]:
    """Returns slices of each view. Indexes only as many dimensions as necessary, mostly none or one, to be fast."""
    few = len(slices)
    while few and slices[few - 1] == _ALL:
        few -= 1
    index = slices[0] if few == 1 else slices[:few]
    return [view[index] for view in views] if few else views


def _chunks(spec: RegionSpec, views: int, chunk: int) -> Iterator[tuple[slice, RegionSpec, tuple[slice, ...]]]:
    """Yields (some of the views, their part that is read, its index): many small views together, parts of a large one.

    At most `chunk` elements at a time.
    """
    region = spec.region
    if region.numel <= chunk:
        together = chunk // region.numel
        for first in range(0, views, together):
            yield slice(first, min(first + together, views)), spec, ()
        return
    for box in split(Box.whole(region.count), chunk):
        part = replace(spec, region=region.part(box))
        for number in range(views):
            yield slice(number, number + 1), part, box.slices()


def sum_words(bits: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """Returns the sums of integers [views, rows, columns], times their coefficients, modulo 2^64: int64 [views]."""
    summed = _sum_on_cpu if bits.device.type == "cpu" else _sum_on_device
    return summed(bits, rows, columns)


def _sum_on_cpu(bits: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """Uses numpy, whose einsum is faster for integers than its own or torch's matrix products."""
    unsigned = bits.numpy().view(f"u{bits.element_size()}").reshape(-1, len(columns))
    by_row = _sum_of_pairs(unsigned, columns)
    if by_row is None:
        by_row = np.einsum("ij,j->i", unsigned.astype(np.uint64), columns)
    return torch.from_numpy(np.einsum("ij,j->i", by_row.reshape(-1, len(rows)), rows).view(np.int64))


def _sum_of_pairs(words: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """Sums two words at a time, a fifth faster than widening each; None if they are not laid out for that.

    For a pair p = low + high * 2^32: low * a + high * b == p * a + high * (b - a * 2^32), modulo 2^64.
    """
    if words.itemsize != 4 or len(columns) % 2 or words.strides[-1] != 4:
        return None
    pairs = words.view(np.uint64)
    if not pairs.flags.aligned:
        return None
    low = np.ascontiguousarray(columns[0::2])
    high = columns[1::2] - (low << np.uint64(32))
    return np.einsum("ij,j->i", pairs, low) + np.einsum("ij,j->i", pairs >> np.uint64(32), high)


def _sum_on_device(bits: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    """Uses torch, with 64-bit integers that wrap around."""
    there = [torch.from_numpy(w.view(np.int64).copy()).to(bits.device, non_blocking=True) for w in (rows, columns)]
    wide = bits.to(torch.int64).bitwise_and_((1 << 8 * bits.element_size()) - 1)  # without the sign
    by_row = wide.mul_(there[1]).sum(-1)
    return by_row.reshape(-1, len(rows)).mul_(there[0]).sum(-1)


def readable(view: torch.Tensor, cast: bool) -> torch.Tensor:
    """Returns the view as `units` takes it: as integers, which torch can stack for any dtype, unless it is cast."""
    return view if cast else view.view(_INTEGERS[view.element_size()])


def units(views: Sequence[torch.Tensor], dtype: torch.dtype, cast: bool, packed: bool) -> torch.Tensor:
    """Returns the bits, as `dtype`, of `readable` views of one shape: integers [views, *leading dims, units of a row].

    A unit is an element of up to 32 bits, or half of one of 64 bits; if `packed`, the two or four elements of a 32-bit
    word. Signs are meaningless.

    cast  True if an update converts the elements: the bits are those that a copy would write, but for NaNs
    """
    bits = torch.stack(list(views)) if len(views) > 1 else views[0].unsqueeze(0)
    if cast:
        bits = readable(_converted(bits, dtype), cast=False)
    if dtype.itemsize > WORD_BYTES or packed:
        # `contiguous` keeps any stride of a dimension of one element, and torch then refuses the view.
        bits = (bits if _in_words(bits) else bits.clone(memory_format=torch.contiguous_format)).view(torch.int32)
    return bits


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts, and gives all NaNs one pattern: that of a cast depends on where in a vector register the NaN was."""
    values = values.to(dtype)
    if not dtype.is_floating_point or (values.device.type == "cpu" and not values.sum().isnan()):
        return values
    return values.masked_fill(values.isnan(), math.nan)


def _in_words(bits: torch.Tensor) -> bool:
    """Returns True if torch can view the memory as 32-bit words."""
    begins = (bits.storage_offset(), *bits.stride()[:-1])
    return bits.stride(-1) == 1 and all(n * bits.element_size() % WORD_BYTES == 0 for n in begins)
