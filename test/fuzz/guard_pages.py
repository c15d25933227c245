"""Memory between two pages that nobody may touch: what is written, or read, beyond it ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

ALIGN_BYTES = 8
_CANARY = 0xA5
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class GuardedPages:
    """Pages between two guard pages, which are used for one tensor after another, and never returned."""

    def __init__(self, pages: int) -> None:
        self.pages, self._nbytes = pages, pages * mmap.PAGESIZE
        begin = _libc.mmap(None, self._nbytes + 2 * mmap.PAGESIZE, _NONE, _PRIVATE, -1, 0)
        assert begin != ctypes.c_void_p(-1).value, "no memory for guard pages"
        inner = begin + mmap.PAGESIZE
        assert _libc.mprotect(inner, self._nbytes, _READ_WRITE) == 0
        self._all = torch.frombuffer((ctypes.c_ubyte * self._nbytes).from_address(inner), dtype=torch.uint8)
        self._bytes = self._all.numpy()
        self._begin = self._end = 0

    def tensor(self, nbytes: int, *, at_end: bool) -> torch.Tensor:
        """Returns bytes whose last, or whose first, is beside a guard page, as near as its alignment allows."""
        self._begin = (self._nbytes - nbytes) // ALIGN_BYTES * ALIGN_BYTES if at_end else 0
        self._end = self._begin + nbytes
        self._bytes[: self._begin] = _CANARY
        self._bytes[self._end :] = _CANARY
        return self._all[self._begin : self._end]

    def is_whole(self) -> bool:
        """Returns whether nothing was written between the tensor and the guard pages."""
        around = self._bytes[: self._begin], self._bytes[self._end :]
        return all(part.tobytes() == bytes([_CANARY]) * len(part) for part in around)


class GuardingTorch:
    """Stands in for torch in a module: bytes that it allocates are between guard pages."""

    def __init__(self) -> None:
        self.used: list[GuardedPages] = []
        self._free: dict[int, list[GuardedPages]] = {}
        self.at_end = True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def bytes(self, nbytes: int) -> torch.Tensor:
        pages = max(1, -(-nbytes // mmap.PAGESIZE))
        free = self._free.setdefault(pages, [])
        found = free.pop() if free else GuardedPages(pages)
        self.used.append(found)
        return found.tensor(nbytes, at_end=self.at_end)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if dtype is torch.uint8 and len(size) == 1:
            return self.bytes(int(size[0]))
        return torch.empty(*size, dtype=dtype, **options)

    def end(self, kept: int) -> None:
        """Ends a case: all but the first `kept` are used again. Raises AssertionError for one that was overrun."""
        assert all(pages.is_whole() for pages in self.used), "something was written beside memory"
        for used in self.used[kept:]:
            self._free[used.pages].append(used)
        del self.used[kept:]
