"""Files of other processes, mapped one after the other into one stretch of addresses.

One tensor then covers them all, so that boxes of many of them can be one strided view: tens of thousands
of small copies become a few large ones (`strips`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch

from sglang_reshard.errors import Mismatch

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux, on all architectures that torch has wheels for
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_files(sizes: Sequence[int], opened: Callable[[int], int]) -> tuple[torch.Tensor, list[int]]:
    """Files of so many bytes each as one tensor of bytes, and where each begins in it: at a page.

    opened  a descriptor, for reading, of file number i; it is closed here

    To be read only: writing into it ends the process, and so does reading from a file that its owner has cut
    short since. The mappings go when the last view of the tensor does. No descriptor stays open.

    Raises what `opened` does, OSError for a file that cannot be mapped, and Mismatch for one that is smaller.
    """
    begins, total = [], 0
    for nbytes in sizes:
        begins.append(total)
        total += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if not total:
        return torch.empty(0, dtype=torch.uint8), begins
    base = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    memory = (ctypes.c_ubyte * total).from_address(base)
    weakref.finalize(memory, _libc.munmap, base, total).atexit = False  # the process's end does it by itself
    for number, (nbytes, begin) in enumerate(zip(sizes, begins, strict=True)):
        descriptor = opened(number)
        try:
            if os.fstat(descriptor).st_size < nbytes:  # what lies beyond a file's end cannot be read
                raise Mismatch(f"file number {number} has fewer than {nbytes:,} bytes")
            _mmap(base + begin, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8), begins


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)
