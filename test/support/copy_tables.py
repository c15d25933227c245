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
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang_reshard.copying import copy_list as copies
from sglang_reshard.copying import kernel_copies
from sglang_reshard.copying.copy_table import CASTS, Launch, Pair, TileKind, launches_of
from sglang_reshard.gpu.runtime import CudaRuntime
from sglang_reshard.landings.checked import checksum, kernel_sums

_KERNEL = "sglang_reshard.copying.copy_kernel"
_KERNELS = (_KERNEL, "sglang_reshard.landings.checked.checksum_kernel")  # which uses the other


class InterpretedGpu(CudaRuntime):
    """The CPU as a GPU whose kernels the interpreter runs. `reachable` says which tensors they can reach."""

    def __init__(self, reachable: Any = lambda tensor: True) -> None:
        self._reachable = reachable
        self.kernels = 0  # times that kernels were compiled or launched

    def is_gpu(self, device: torch.device) -> bool:
        return True

    def reachable_by_kernels(self, memory: torch.Tensor, device: torch.device) -> bool:
        return bool(self._reachable(memory))

    def using(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        self.kernels += 1
        return contextlib.nullcontext()


@functools.cache
def interpreted_kernel(name: str = _KERNEL) -> ModuleType:
    """Returns a kernel's module as it is with TRITON_INTERPRET=1, whatever other code made of Triton before.

    The interpreter runs one launch at a time.
    """
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        spec.loader.exec_module(module)
    if hasattr(module, "_plus"):
        import triton.language as tl

        module._plus = tl.standard._sum_combine  # type: ignore[attr-defined]  # numpy then sums, not Python
    lock, launch = threading.Lock(), module.launch

    def launch_alone(*args: Any) -> None:
        with lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities and NaN, and of integers that wrap
            launch(*args)

    module.launch = launch_alone  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def interpreted(gpu: InterpretedGpu | None = None) -> Iterator[InterpretedGpu]:
    """Copy lists and checksums take the GPU's way inside the block, and nothing else does."""
    gpu = gpu or InterpretedGpu()
    known = {name: sys.modules.get(name) for name in _KERNELS}  # and not mock.patch.dict, which forgets imports
    with contextlib.ExitStack() as patches:
        for name in _KERNELS:
            sys.modules[name] = interpreted_kernel(name)
        for user in (copies, kernel_copies, checksum, kernel_sums):
            patches.enter_context(mock.patch.object(user, "runtime", return_value=gpu))
        kernel_sums.can_compile.cache_clear()
        try:
            yield gpu
        finally:
            kernel_sums.can_compile.cache_clear()
            for name, module in known.items():
                del sys.modules[name]
                if module is not None:
                    sys.modules[name] = module


def run_in_numpy(launch: Launch, memory: torch.Tensor) -> None:
    """Runs a launch in `memory`, of dtype uint8, tile by tile. Fails where the kernel would be promised too much."""
    kind, first = launch.kind, memory.data_ptr()
    dtypes = [torch.uint8 if kind.way == "shifted" else getattr(torch, name) for name in kind[:2]]
    assert all(n & (n - 1) == 0 for n in (kind.rows, kind.columns, kind.vector))
    for packed in launch.tiles.tolist():
        box, tile = launch.boxes[packed >> 32].tolist(), packed & 0xFFFFFFFF
        addresses, (middle, last, rows, columns), strides = box[:2], box[2:6], box[6:]
        for address, dtype in zip(addresses, dtypes, strict=True):
            assert address % (kind.vector * dtype.itemsize) == 0
        divisible = [columns, *strides[:6]]
        if kind.way == "transposed":
            assert (strides[2], strides[7]) == (1, 1)
            divisible = [columns, last, *strides[:2], *strides[3:7]]
        assert not any(n % kind.vector for n in divisible)
        assert kind.way in ("transposed", "strided") or strides[6:] == [1, 1]
        assert rows < 1 << 31
        row, column = _tile(kind, tile, last, rows, columns)
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


def _tile(kind: TileKind, tile: int, last: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and the columns of a tile. The last tile of a shifted row has the bytes that make no word."""
    units, unit = (columns // 8, 8) if kind.way == "shifted" else (columns, 1)
    across = -(-units // kind.columns)
    down, right = divmod(tile, across)
    column = right * kind.columns * unit + np.arange(kind.columns * unit)
    if right == across - 1:
        column = np.arange(column[0], columns)
    if kind.way == "transposed":
        outer, block = divmod(down, -(-last // kind.rows))
        inner = block * kind.rows + np.arange(kind.rows)
        return outer * last + inner[inner < last], column
    row = down * kind.rows + np.arange(kind.rows)
    return row[row < rows], column


def pairs_by_way() -> dict[str, Pair]:
    """Pairs of views, destination and source, as they are aligned and strided in updates."""
    bfloat16, float32 = (torch.empty(2, 1 << 20, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    to, of = bfloat16[0].view(1024, 1024), bfloat16[1].view(1024, 1024)
    odd = bfloat16[1, 1 : 1 + 512 * 1024].view(512, 1024)
    return {
        "aligned": (to, of),
        "odd range": (to[:512], odd),
        "columns of an odd range": (to[:512, :128], odd[:, 256:384]),
        "odd bytes": (to[:512].view(torch.uint8), of.view(-1).view(torch.uint8)[1 : 1 + (1 << 20)].view(512, -1)),
        "float32 to bfloat16": (to, float32[1].view(1024, 1024)),
        "bfloat16 to float32": (float32[0].view(1024, 1024)[:, :64], of[:, :64]),
        "transposed": (to, of.t()),
        "transposed, float32 to bfloat16": (to, float32[1].view(1024, 1024).t()),
        "transposed, of odd sizes": (to[:1001, :1003], of[:1003, :1001].t()),
        "steps": (to[::2, ::2], of[::2, ::2]),
    }


def ptx_of(capability: int) -> dict[str, Any]:
    """Compiles kernels for GPUs of this compute capability.

    Returns how many instructions of each thread move data, by pair and by name without hints; the names of those that
    have no hint; and whether any kernel flushes subnormals.
    """
    from sglang_reshard.copying import copy_kernel

    def ptx(kind: TileKind) -> str:
        return ptx_of_kernel(copy_kernel.copy_tiles, copy_kernel.constants(kind), copy_kernel.WARPS, capability)

    def kind_of(pair: Pair) -> TileKind:
        ((launch,), _) = launches_of([pair])
        return launch.kind

    texts, moves, unhinted = [], {}, set[str]()
    for name, pair in pairs_by_way().items():
        texts.append(ptx(kind_of(pair)))
        # All but the table, which is read by scalar loads of 64 bits.
        found = [n for n in re.findall(r"\b(?:ld|st)\.(?:global|shared)\S*", texts[-1]) if n != "ld.global.b64"]
        moves[name] = dict(Counter(re.sub(r"\.L[12]::\w+", "", n) for n in found))
        unhinted |= {n for n in found if "global" in n and "L1::evict_first" not in n}
    matrices = {dtype: torch.empty(4, 1024, dtype=dtype)[:, :512] for dtype in CASTS}
    texts += [ptx(kind_of((matrices[a], matrices[b]))) for a in CASTS for b in CASTS if a != b]
    return {"moves": moves, "unhinted": unhinted, "flushes_subnormals": any(".ftz" in text for text in texts)}


def checksum_ptx_of(capability: int, source: str, target: str, *constants: Any) -> str:
    """Compiles the kernel of checksums, with these constants, for GPUs of this compute capability."""
    import triton.language as tl

    from sglang_reshard.landings.checked import checksum_kernel as kernel

    constants = (getattr(tl, source), getattr(tl, target), *constants)
    return ptx_of_kernel(kernel.sum_tiles, constants, kernel.WARPS, capability)


def ptx_of_kernel(kernel: Any, constants: Sequence[Any], warps: int, capability: int) -> str:
    """Compiles a kernel that is given two tables of int64, then constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**dict.fromkeys(kernel.arg_names[:2], "*i64"), **dict.fromkeys(kernel.arg_names[2:], "constexpr")}
    values = {(2 + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    source = ASTSource(kernel, signature, values, aligned)
    target = GPUTarget("cuda", capability, 32)
    found: str = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
    return found
