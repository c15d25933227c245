"""Lists of tensor copies that run in one call."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
import torch

from sglang_reshard.copying.host_copies import Pair, host_copies
from sglang_reshard.copying.kernel_copies import KernelCopies
from sglang_reshard.gpu.runtime import runtime

_assign: Any = operator.setitem  # its stub does not know that `...` is an index
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class CopyList:
    """Pairs of views, copied in one call. Casts where dtypes differ.

    On a GPU a few kernels make all copies (`kernel_copies`), in host memory numpy (`host_copies`). Memory that kernels
    cannot reach, and casts in host memory, are left to torch.
    """

    def __init__(self, movable: Iterable[torch.Tensor] = ()) -> None:
        """movable  tensors whose storages may be moved in place between two runs, as into shared memory.

        The prepared list holds addresses: other memory that is moved or freed must not be copied afterwards.
        """
        self._movable, self._addresses = list(movable), list[int]()
        self._destinations: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._kernels: list[KernelCopies] = []
        self._written: list[np.ndarray] = []
        self._read: list[np.ndarray] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None

    def add(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._destinations.append(destination)
        self._sources.append(source)

    def build(self) -> None:
        """Prepares `run`, once all is added: writes the tables of a GPU, and compiles its kernels, which takes seconds.

        So it has to be called before any rank may write.
        """
        self._kernels, self._written, self._read, self._groups = [], [], [], []
        self._addresses = [tensor.data_ptr() for tensor in self._movable]
        by_device: dict[torch.device, list[Pair]] = {}
        for pair in zip(self._destinations, self._sources, strict=True):
            by_device.setdefault(pair[0].device, []).append(pair)
        for device, pairs in by_device.items():
            if runtime().is_gpu(device):
                kernels, rest = KernelCopies.of(pairs, device)
                self._kernels.append(kernels)
                self._groups += _by_dtype(rest)
            else:
                written, read, rest = host_copies(pairs)
                self._written += written
                self._read += read
                if rest:
                    self._groups.append(([pair[0] for pair in rest], [pair[1] for pair in rest]))

    @property
    def table_bytes(self) -> int:
        """Bytes of GPU memory that the prepared list takes."""
        return sum(kernels.table_bytes for kernels in self._kernels)

    @property
    def launches(self) -> int:
        """Kernels that a run launches; 0 where torch makes all copies."""
        return sum(len(kernels.launches) for kernels in self._kernels)

    def run(self) -> None:
        assert self._groups is not None, "build() comes first"
        if self._addresses != [tensor.data_ptr() for tensor in self._movable]:
            self.build()
        for kernels in self._kernels:
            kernels.run()
        deque(map(_assign, self._written, repeat(...), self._read), maxlen=0)
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
