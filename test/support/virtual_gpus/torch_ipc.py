"""torch's own handles of GPU memory, with their counters: `UntypedStorage._share_cuda_` and `_new_shared_cuda`.

Sharing sets a counter to 1, every process that has opened the handle subtracts 1 when it drops it, and memory is freed
once its tensors are gone and the counter is exactly 0 (CudaIPCTypes.cpp). So it leaks unless one process has opened it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from support.virtual_gpus.journal import Journal
from support.virtual_gpus.libcuda import HANDLE, MAGIC, VirtualLibcuda
from support.virtual_gpus.memory import Memory, VirtualMemory


class VirtualTorchIpc:
    """Of one process."""

    def __init__(self, memory: VirtualMemory, library: VirtualLibcuda, cuda: Any, allocator: str, journal: Journal):
        self._memory, self._library, self._cuda = memory, library, cuda
        self._allocator, self._journal = allocator, journal
        self._shared: dict[int, Path] = {}  # counter by allocation

    def install(self) -> None:
        ipc = self
        torch.UntypedStorage._share_cuda_ = lambda storage: ipc._share(storage)  # type: ignore[method-assign]
        torch.UntypedStorage._new_shared_cuda = (  # type: ignore[method-assign]
            lambda *arguments, **_: ipc._open(*arguments)
        )
        torch.UntypedStorage._release_ipc_counter_cuda = (  # type: ignore[method-assign]
            lambda handle, _offset, **__: _add(ipc._counter(handle), -1)
        )
        self._memory.is_referred_to = self._is_referred_to  # type: ignore[method-assign]

    def _share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        found = self._memory.find(storage.data_ptr())
        assert found is not None
        if self._allocator == "cudaMallocAsync":
            raise RuntimeError("cudaMallocAsync does not yet support getIpcDevPtr")
        name = f"/torch_{os.getpid()}_{found.id}_0"  # as torch's are called
        counter = self._counter(name.encode())
        counter.write_text("1")
        self._shared[found.id] = counter
        kind = bytes([self._allocator == "expandable_segments"])
        handle = kind + HANDLE.pack(MAGIC, found.pid, found.number, found.id, found.nbytes, b"")
        index, offset = storage.device.index, storage.data_ptr() - found.base
        return index, handle, storage.nbytes(), offset, name.encode(), 0, bytes(64), True

    def _open(
        self, index: int, handle: bytes, nbytes: int, offset: int, counter: bytes, _offset: int, *_: Any
    ) -> torch.UntypedStorage:
        if handle[0]:
            raise RuntimeError("pidfd_getfd: Operation not permitted")
        with torch.cuda.device(index):
            torch.cuda.synchronize(index)
            address, passed = ctypes.c_uint64(0), _Passed.from_buffer_copy(handle[1:])
            if code := self._library.cuIpcOpenMemHandle_v2(ctypes.byref(address), passed, ctypes.c_uint(1)):
                raise RuntimeError(f"CUDA error {code} when a handle was opened")
        memory = (ctypes.c_ubyte * nbytes).from_address(address.value + offset)
        weakref.finalize(memory, self._drop, index, address.value, self._counter(counter)).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _counter(self, name: bytes) -> Path:
        return self._memory.folder / name.decode().lstrip("/")

    def _drop(self, index: int, address: int, counter: Path) -> None:
        _add(counter, -1)
        torch.cuda.synchronize(index)
        self._library.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def _is_referred_to(self, memory: Memory) -> bool:
        counter = self._shared.get(memory.id)
        return counter is not None and int(counter.read_text()) != 0


class _Passed(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE.size),)


def _add(counter: Path, change: int) -> None:
    with counter.open("r+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        value = int(f.read()) + change
        f.seek(0)
        f.truncate()
        f.write(str(value))
