"""The CUDA driver's calls for memory handles, through ctypes.

torch's own handles (`UntypedStorage._share_cuda_`) count their openers in shared memory and free a storage when the
count is exactly zero, which fails for none and for several openers; and they open on the GPU's index in this process,
which needs the GPU to be visible. The driver's own have neither rule: a handle can be opened on any device with peer
access, and the process that made it keeps the memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_DEVICE_POINTER, _BUFFER_ID, _IPC_CAPABLE, _RANGE_START, _RANGE_SIZE = 3, 7, 10, 11, 12  # CU_POINTER_ATTRIBUTE_*
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PORTABLE, _DEVICEMAP, _READ_ONLY = 1, 2, 8  # CU_MEMHOSTREGISTER_*


class DriverError(Exception):
    """A call failed. `name` is the driver's name of the error, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED for example."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call, self.name = call, name


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Calls `library`, libcuda, in the thread's current context, which must be the device's. All raise DriverError."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def attribute(self, address: int, attribute: int) -> int:
        value = ctypes.c_uint64(0)
        self._call("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(address))
        return value.value

    def allocation(self, address: int) -> tuple[int, int, int]:
        """Returns first address, bytes, and id of the allocation that `address` lies in. An id never recurs.

        For memory that `has_handle`: of virtual memory, the range is the reserved one, not the mapped one.
        """
        return (
            self.attribute(address, _RANGE_START),
            self.attribute(address, _RANGE_SIZE),
            self.attribute(address, _BUFFER_ID),
        )

    def is_seen_by_kernels(self, address: int) -> bool:
        """Returns whether kernels of the current device can use `address` as it is. Raises for pageable host memory."""
        return self.attribute(address, _DEVICE_POINTER) == address

    def has_handle(self, address: int) -> bool:
        """Returns whether the memory is of a kind that `export_handle` accepts, as cudaMalloc's is."""
        return bool(self.attribute(address, _IPC_CAPABLE) & 0xFFFFFFFF)

    def export_handle(self, base: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle.reserved)

    def open_handle(self, handle: bytes) -> int:
        """Maps another process's allocation for the current device. Returns its first address here."""
        address = ctypes.c_uint64(0)
        passed = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), passed, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close_handle(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def register_host(self, address: int, nbytes: int) -> None:
        """Makes pages that this process may only read accessible to all devices, at the same address."""
        try:
            self._register_host(address, nbytes, _PORTABLE | _DEVICEMAP | _READ_ONLY)
        except DriverError as error:
            if error.name != "CUDA_ERROR_NOT_SUPPORTED":
                raise
            self._register_host(address, nbytes, _PORTABLE | _DEVICEMAP)  # devices that read by the host's page tables
        seen = ctypes.c_uint64(0)
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
        if seen.value != address:
            self.unregister_host(address)
            raise DriverError("cuMemHostGetDevicePointer_v2", "GPUs see this memory at another address than the host")

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def relax_capture_mode(self) -> None:
        """Allows the calling thread, from now on, calls that would break a capture of another thread."""
        mode = ctypes.c_int(_RELAXED)  # it is exchanged for the thread's mode before
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _register_host(self, address: int, nbytes: int, flags: int) -> None:
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, (text.value or b"").decode() or f"error {code}")


@cache
def cuda_driver() -> CudaDriver:
    """Raises OSError on a host without the driver."""
    return CudaDriver(ctypes.CDLL("libcuda.so.1"))
