"""Lists of tensor copies that run in one call, and the merging of many small ones into few strided ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.transports.copy_table import DEFAULT_TILING, Pair, Tiling
from sglang_reshard.transports.kernel_copies import KernelCopies

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_PERIODS = (1, 2, 3, 4)  # gate and up projections alternate in a fused tensor, at two distances


class CopyList:
    """Pairs of views, copied in one call. Casts where dtypes differ.

    On a GPU a few kernels make all copies (`kernel_copies`), on CPU one `_foreach_copy_`. Memory that kernels cannot
    reach is left to torch.
    """

    def __init__(self) -> None:
        self._destinations: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._kernels: list[KernelCopies] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None

    def add(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._destinations.append(destination)
        self._sources.append(source)

    def build(self, tiling: Tiling = DEFAULT_TILING) -> None:
        """Prepares `run`, once all is added: writes the tables of a GPU, and compiles its kernels, which takes seconds.

        So it has to be called before any rank may write.
        """
        self._kernels, self._groups = [], []
        by_device: dict[torch.device, list[Pair]] = {}
        for pair in zip(self._destinations, self._sources, strict=True):
            by_device.setdefault(pair[0].device, []).append(pair)
        for device, pairs in by_device.items():
            if runtime().is_gpu(device):
                kernels, rest = KernelCopies.of(pairs, device, tiling)
                self._kernels.append(kernels)
                self._groups += _by_dtype(rest)
            else:
                self._groups.append(([pair[0] for pair in pairs], [pair[1] for pair in pairs]))

    @property
    def table_bytes(self) -> int:
        """Bytes of GPU memory that the prepared list takes."""
        return sum(kernels.table_bytes for kernels in self._kernels)

    def run(self) -> None:
        assert self._groups is not None, "build() comes first"
        for kernels in self._kernels:
            kernels.run()
        with torch.inference_mode():  # a quarter faster than no_grad for thousands of small boxes
            for destinations, sources in self._groups:
                torch._foreach_copy_(destinations, sources)


def _by_dtype(pairs: list[Pair]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Returns one list of copies for each pair of dtypes; equal dtypes are copied as integers.

    On GPUs torch has copied mixed lists wrongly, and it has no fast path for some dtypes.
    """
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for destination, source in pairs:
        if destination.dtype == source.dtype and (unit := _INTEGERS.get(source.element_size())) is not None:
            destination, source = destination.view(unit), source.view(unit)
        destinations, sources = groups.setdefault((destination.dtype, source.dtype), ([], []))
        destinations.append(destination)
        sources.append(source)
    return list(groups.values())


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
