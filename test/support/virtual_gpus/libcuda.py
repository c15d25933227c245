"""The functions of the CUDA driver that `gpu.driver` calls, for virtual memory."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from support.virtual_gpus.description import VirtualGpus
from support.virtual_gpus.journal import Journal
from support.virtual_gpus.memory import VirtualMemory

HANDLE = struct.Struct("<8sIIQQ32s")  # magic, process, GPU, allocation, bytes, unused
MAGIC = b"virtual!"
_INVALID_VALUE, _INVALID_CONTEXT, _PEER_ACCESS_UNSUPPORTED, _ALREADY_REGISTERED = 1, 201, 217, 712
_NAMES = {
    _INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    _INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    _PEER_ACCESS_UNSUPPORTED: b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    _ALREADY_REGISTERED: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
}
_DEVICE_POINTER, _BUFFER_ID, _IPC_CAPABLE, _RANGE_START, _RANGE_SIZE = 3, 7, 10, 11, 12


class VirtualLibcuda:
    """Counts what is open: a handle that is opened twice is mapped once, and unmapped when it is closed twice.

    current  returns the number of the GPU whose context is the thread's, None if it has none
    """

    def __init__(
        self, gpus: VirtualGpus, memory: VirtualMemory, allocator: str, journal: Journal, current: Any
    ) -> None:
        self._gpus, self._memory, self._allocator, self._journal = gpus, memory, allocator, journal
        self._current = current
        self._opened: dict[int, int] = {}  # by address
        self.registered: dict[int, int] = {}  # bytes by address

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = _NAMES[code]
        return 0

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: ctypes.c_uint64) -> int:
        found = self._memory.find(address.value)
        if found is None:
            if attribute != _DEVICE_POINTER or not self.is_registered(address.value):
                return _INVALID_VALUE
            value._obj.value = address.value
            return 0
        value._obj.value = {
            _DEVICE_POINTER: address.value,
            _BUFFER_ID: found.id,
            _RANGE_START: found.base,
            _RANGE_SIZE: found.nbytes,
            _IPC_CAPABLE: int(self._allocator == "native"),
        }[attribute]
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: ctypes.c_uint64) -> int:
        if self._current() is None:
            return _INVALID_CONTEXT
        found = self._memory.find(base.value)
        if found is None or found.mapped or self._allocator != "native":
            return _INVALID_VALUE
        data = HANDLE.pack(MAGIC, found.pid, found.number, found.id, found.nbytes, b"")
        ctypes.memmove(handle._obj.reserved, data, len(data))
        self._journal.note("export", id=found.id)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        number = self._current()
        if number is None:
            return _INVALID_CONTEXT
        magic, pid, source, id, nbytes, _ = HANDLE.unpack(bytes(handle.reserved))
        if magic != MAGIC:
            return _INVALID_VALUE
        if pid == os.getpid():
            return _INVALID_CONTEXT  # a handle cannot be opened where it was made
        if number != source and not self._gpus.have_peer_access(number, source):
            return _PEER_ACCESS_UNSUPPORTED
        if flags.value != 1:
            raise self._journal.broken("cuIpcOpenMemHandle takes CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS and no other flag")
        found = self._memory.open(pid, id, source, nbytes)
        if found is None:
            self._journal.note("open_freed", pid=pid, id=id)
            return _INVALID_VALUE
        self._opened[found.base] = self._opened.get(found.base, 0) + 1
        self._journal.note("open", pid=pid, id=id, source=source, on=number, count=self._opened[found.base])
        address._obj.value = found.base
        return 0

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        if self._current() is None:
            return _INVALID_CONTEXT
        found = self._memory.find(address.value)
        if found is None or not found.mapped or found.base != address.value:
            self._journal.broken("cuIpcCloseMemHandle of memory that is not open")
            return _INVALID_VALUE
        self._opened[found.base] -= 1
        self._journal.note("close", pid=found.pid, id=found.id, count=self._opened[found.base])
        if not self._opened[found.base]:
            del self._opened[found.base]
            self._memory.close(found)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value = self._memory.captures.exchange_mode(mode._obj.value)
        return 0

    def is_registered(self, address: int) -> bool:
        """Returns whether kernels can read this host memory."""
        return any(begin <= address < begin + nbytes for begin, nbytes in self.registered.items())

    def cuMemHostRegister_v2(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: Any) -> int:
        begin = address.value or 0
        if any(begin < other + n and other < begin + nbytes.value for other, n in self.registered.items()):
            return _ALREADY_REGISTERED
        self.registered[begin] = nbytes.value
        self._journal.note("register", nbytes=nbytes.value)
        return 0

    def cuMemHostGetDevicePointer_v2(self, seen: Any, address: ctypes.c_void_p, _flags: Any) -> int:
        seen._obj.value = address.value
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:
        if self.registered.pop(address.value or 0, None) is None:
            self._journal.broken("cuMemHostUnregister of memory that is not registered")
            return _INVALID_VALUE
        self._journal.note("unregister")
        return 0
