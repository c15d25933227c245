"""Makes the copies of a `CopyTable` as the Triton kernel does, in virtual GPU memory, and looks at every address."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sglang_reshard.copying.copy_table import FIELDS, TileKind
from support.virtual_gpus.journal import Journal
from support.virtual_gpus.libcuda import VirtualLibcuda
from support.virtual_gpus.memory import VirtualMemory


class VirtualKernel:
    """In place of the module `copying.copy_kernel`."""

    def __init__(self, memory: VirtualMemory, library: VirtualLibcuda, cuda: Any, journal: Journal) -> None:
        self._memory, self._library, self._cuda, self._journal = memory, library, cuda, journal

    def install(self) -> None:
        module: Any = ModuleType("sglang_reshard.copying.copy_kernel")
        module.compile_kernel, module.launch = lambda *_: None, self.launch
        sys.modules[module.__name__] = module

    def launch(self, kind: TileKind, boxes: torch.Tensor, tiles: torch.Tensor, *_: Any) -> None:
        if not (boxes.is_cuda and tiles.is_cuda):
            raise self._journal.broken("a kernel was given a table in host memory")
        gpu = self._memory.find(boxes.data_ptr()).number  # type: ignore[union-attr]
        self._cuda.copied(gpu)
        tables = (boxes.data_ptr(), boxes.numel()), (tiles.data_ptr(), tiles.numel())  # who runs it keeps them
        written = boxes.view(-1, FIELDS)[:, 1].tolist()
        self._memory.write_later(gpu, written, lambda: self._run(kind, *(self._table(*table) for table in tables)))

    def _table(self, address: int, count: int) -> torch.Tensor:
        return self._view(address, torch.int64, (count,), (1,), False)

    def _run(self, kind: TileKind, boxes: torch.Tensor, tiles: torch.Tensor) -> None:
        table = boxes.view(-1, FIELDS)
        wanted, given = kind.tiles_of(table.numpy()), np.bincount((tiles >> 32).numpy(), minlength=len(table))
        for box, whole, tiled in zip(table.tolist(), wanted.tolist(), given.tolist(), strict=True):
            source, destination, middle, last, rows, columns, *strides = box
            if tiled != whole:
                raise self._journal.broken(f"a kernel was given {tiled} of {whole} tiles of a box")
            size = (rows // (middle * last), middle, last, columns)
            dtypes = [torch.uint8] * 2 if kind.way == "shifted" else [getattr(torch, name) for name in kind[:2]]
            to = self._view(destination, dtypes[1], size, (*strides[3:6], strides[7]), True)
            to.copy_(self._view(source, dtypes[0], size, (*strides[:3], strides[6]), False))

    def _view(
        self, address: int, dtype: torch.dtype, size: tuple[int, ...], strides: tuple[int, ...], written: bool
    ) -> torch.Tensor:
        begin, nbytes = self._range(address, written)
        end = address + (sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + 1) * dtype.itemsize
        if end > begin + nbytes:
            raise self._journal.broken("a kernel accessed an illegal address: beyond an allocation's end")
        memory = torch.frombuffer((ctypes.c_ubyte * (end - address)).from_address(address), dtype=dtype)
        return memory.as_strided(size, strides)

    def _range(self, address: int, written: bool) -> tuple[int, int]:
        """Begin and bytes of the memory that a kernel may access there."""
        found = self._memory.find(address)
        if found is not None and not (written and found.mapped):
            return found.base, found.nbytes
        if not written and found is None:
            for begin, nbytes in self._library.registered.items():
                if begin <= address < begin + nbytes:
                    return begin, nbytes
        raise self._journal.broken(f"a kernel {'wrote to' if written else 'read from'} an illegal address")
