"""Copy tables run without a GPU: in numpy, which checks what tables promise, and by Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

import sglang_reshard.copying
from sglang_reshard.copying import copy_list as copies
from sglang_reshard.copying import kernel_copies
from sglang_reshard.copying.copy_table import Launch, TileKind
from sglang_reshard.gpu.runtime import CudaRuntime

_KERNEL = "sglang_reshard.copying.copy_kernel"


class InterpretedGpu(CudaRuntime):
    """The CPU as a GPU whose kernels the interpreter runs. `reachable` says which tensors they can reach."""

    def __init__(self, reachable: Any = lambda tensor: True) -> None:
        self._reachable = reachable
        self.kernels = 0  # lists of copies that were built with kernels

    def is_gpu(self, device: torch.device) -> bool:
        return True

    def reachable_by_kernels(self, memory: torch.Tensor, device: torch.device) -> bool:
        return bool(self._reachable(memory))

    def using(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self, devices: Any) -> None:
        self.kernels += 1


@functools.cache
def interpreted_kernel() -> ModuleType:
    """Returns the kernel's module as it is with TRITON_INTERPRET=1, whatever other code made of Triton before.

    The interpreter runs one launch at a time.
    """
    path = Path(sglang_reshard.copying.__file__).with_name("copy_kernel.py")
    spec = importlib.util.spec_from_file_location(_KERNEL, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        spec.loader.exec_module(module)
    lock, launch = threading.Lock(), module.launch

    def launch_alone(*args: Any) -> None:
        with lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities and NaN
            launch(*args)

    module.launch = launch_alone  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def interpreted(gpu: InterpretedGpu | None = None) -> Iterator[InterpretedGpu]:
    """Copy lists take the GPU's way inside the block, and nothing else does."""
    gpu = gpu or InterpretedGpu()
    known = sys.modules.get(_KERNEL)  # and not mock.patch.dict, which forgets what the block imports
    sys.modules[_KERNEL] = interpreted_kernel()
    with (
        mock.patch.object(copies, "runtime", return_value=gpu),
        mock.patch.object(kernel_copies, "runtime", return_value=gpu),
    ):
        try:
            yield gpu
        finally:
            del sys.modules[_KERNEL]
            if known is not None:
                sys.modules[_KERNEL] = known


def run_in_numpy(launch: Launch, memory: torch.Tensor) -> None:
    """Runs a launch in `memory`, of dtype uint8, tile by tile. Fails where the kernel would be promised too much."""
    kind, first = launch.kind, memory.data_ptr()
    dtypes = [getattr(torch, name) for name in (kind.source, kind.destination)]
    assert all(n & (n - 1) == 0 for n in (kind.rows, kind.columns, kind.vector))
    for packed in launch.tiles.tolist():
        box, tile = launch.boxes[packed >> 32].tolist(), packed & 0xFFFFFFFF
        addresses, (middle, last, rows, columns), strides = box[:2], box[2:6], box[6:]
        for address, dtype in zip(addresses, dtypes, strict=True):
            assert address % (kind.vector * dtype.itemsize) == 0
        assert not any(n % kind.vector for n in (columns, *strides[:6]))
        assert kind.strided or strides[6:] == [1, 1]
        assert rows < 1 << 31
        across = -(-columns // kind.columns)
        row = tile // across * kind.rows + np.arange(kind.rows)
        column = tile % across * kind.columns + np.arange(kind.columns)
        row, column = row[row < rows], column[column < columns]
        assert len(row)
        assert len(column)
        indices = row // last // middle, row // last % middle, row % last
        at = []
        for side, dtype in enumerate(dtypes):
            units = sum(i * n for i, n in zip(indices, strides[3 * side : 3 * side + 3], strict=True))
            units = units[:, None] + column[None, :] * strides[6 + side]
            items = torch.from_numpy(addresses[side] - first + units * dtype.itemsize)
            at.append(items.view(-1, 1) + torch.arange(dtype.itemsize))
        values = memory[at[0]].view(dtypes[0]).to(dtypes[1])
        memory[at[1]] = values.view(torch.uint8)


def ptx_of(capability: int) -> dict[str, Any]:
    """Compiles kernels for GPUs of this compute capability. Returns the instructions that move data in some of them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_reshard.copying import copy_kernel

    def ptx(kind: TileKind) -> str:
        constants = copy_kernel.constants(kind)
        names = copy_kernel.copy_tiles.arg_names
        signature = {"boxes": "*i64", "tiles": "*i64", **dict.fromkeys(names[2:], "constexpr")}
        values = {(2 + i,): value for i, value in enumerate(constants)}
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
        source = ASTSource(copy_kernel.copy_tiles, signature, values, aligned)
        options = {"num_warps": copy_kernel.WARPS}
        found: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        return found

    kinds = {
        "bytes16": TileKind("int64", "int64", 2, False, 1, 2048),
        "odd_bytes": TileKind("int8", "int8", 1, False, 1, 4096),
        "float32_to_bfloat16": TileKind("float32", "bfloat16", 4, False, 1, 4096),
        "bfloat16_to_float32": TileKind("bfloat16", "float32", 4, False, 64, 64),
        "transposed": TileKind("int16", "int16", 1, True, 64, 64),
    }
    found: dict[str, Any] = {name: ptx(kind) for name, kind in kinds.items()}
    for source in ("float64", "float32", "float16", "bfloat16"):
        for destination in ("float64", "float32", "float16", "bfloat16"):
            if source != destination:
                found[f"{source}, {destination}"] = ptx(TileKind(source, destination, 2, False, 4, 512))
    flushes = any(".ftz" in text for text in found.values())
    # All but the table, which is read by scalar loads of 64 bits.
    moves = {name: set(re.findall(r"\b(?:ld|st)\.global\S*", text)) - {"ld.global.b64"} for name, text in found.items()}
    return moves | {"flushes_subnormals": flushes}
