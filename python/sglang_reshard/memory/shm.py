"""Shared memory: moving storages into it, opening exactly the file that was announced, mapping many as one tensor.

Files are mapped one after the other into one range of addresses. One tensor covers them all, so that boxes of many of
them can be one strided view: tens of thousands of small copies become a few large ones (`copying.host_copies`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import aligned

_TMPFS_MAGIC = 0x01021994  # of /dev/shm and of memfd_create
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # on Linux, on all architectures that torch has wheels for
_PROT_NONE = 0
_SPARE_DESCRIPTORS = 64  # left for the rest of the process

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def open_shared(pid: int, fd: int, inode: int, nbytes: int) -> int:
    """Returns a read-only descriptor of the unlinked shared-memory file that process `pid` has open as `fd`.

    The process may have reused the descriptor's number for another file. So the file is checked before it is opened for
    reading, and the file that was checked is the one that is opened. The caller closes it.

    Raises OSError if it cannot be opened, and Mismatch if it is not a regular file in memory, without a name, of this
    inode and exactly so many bytes.
    """
    # O_PATH only looks it up: opening a device or a pipe may have side effects, and may block forever.
    path = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or _file_system_type(path) != _TMPFS_MAGIC:
            raise Mismatch(f"descriptor {fd} of process {pid} is not a shared memory file of sglang-reshard")
        if (status.st_ino, status.st_size) != (inode, nbytes):
            raise Mismatch(
                f"descriptor {fd} of process {pid} has inode {status.st_ino} and {status.st_size:,} bytes, expected "
                f"inode {inode} and {nbytes:,} bytes"
            )
        # O_NONBLOCK: does not wait for a process that holds a lease on it.
        return os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(path)


def map_files(sizes: Sequence[int], open_file: Callable[[int], int]) -> tuple[torch.Tensor, list[int]]:
    """Returns files of the given sizes (bytes) as one tensor of bytes, and the page-aligned offset of each in it.

    open_file  returns a read-only descriptor of file number i; it is closed here

    The tensor must only be read: writing to it ends the process, and so does reading from a file that its owner has
    truncated since. The files are unmapped when the last view of the tensor is freed. No descriptor stays open.

    Raises what `open_file` does, OSError for a file that cannot be mapped, and Mismatch for one that is too small.
    """
    begins, total = [], 0
    for nbytes in sizes:
        begins.append(total)
        total += aligned(nbytes, mmap.PAGESIZE)
    if not total:
        return torch.empty(0, dtype=torch.uint8), begins
    base = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    memory = (ctypes.c_ubyte * total).from_address(base)
    weakref.finalize(memory, _libc.munmap, base, total).atexit = False  # the end of the process unmaps it anyway
    for number, (nbytes, begin) in enumerate(zip(sizes, begins, strict=True)):
        descriptor = open_file(number)
        try:
            if os.fstat(descriptor).st_size < nbytes:  # pages beyond a file's end cannot be read
                raise Mismatch(f"file number {number} has fewer than {nbytes:,} bytes")
            _mmap(base + begin, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        finally:
            os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8), begins


def share(storage: torch.UntypedStorage, who: str) -> tuple[int, int]:
    """Moves a CPU storage in place into shared memory. Returns its descriptor, which the storage owns, and its bytes.

    Every tensor on it follows. One that is shared already stays where it is. The descriptor is negative for one that
    is mapped from a file. Raises Unsupported, naming `who`, if there is too little shared memory.
    """
    with _allocating(storage.nbytes(), who):
        descriptor, nbytes = storage._share_fd_cpu_()
        return int(descriptor), int(nbytes)


def read_only_view(storage: torch.UntypedStorage) -> torch.Tensor | None:
    """Maps a storage once more, without the right to write: bytes, 1-D. None for one that is in no shared-memory file.

    Through this mapping nobody changes the storage: neither this process, nor the kernel or a peer over a network that
    writes to its addresses.
    """
    if storage.device.type != "cpu" or not storage.nbytes() or not storage.is_shared():
        return None
    descriptor, nbytes = storage._share_fd_cpu_()  # one that is shared stays where it is
    if descriptor < 0 or nbytes < storage.nbytes():
        return None
    flags = os.O_RDONLY | os.O_CLOEXEC
    mapped, _ = map_files([storage.nbytes()], lambda _: os.open(f"/proc/self/fd/{descriptor}", flags))
    return mapped


def allocate_shared(nbytes: int, who: str) -> torch.UntypedStorage:
    """Returns a storage in shared memory. Raises Unsupported, naming `who`, if there is too little."""
    with _allocating(nbytes, who):
        return torch.UntypedStorage._new_using_fd_cpu(nbytes)


@contextmanager
def _allocating(nbytes: int, who: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # other processes of this host use the same file system
        # torch unlinks only files that it could make large enough.
        if found := re.search(rf"torch_{os.getpid()}_\w+", str(error)):
            Path("/dev/shm", found.group()).unlink(missing_ok=True)
        raise Unsupported(
            f"{who}: {nbytes:,} bytes of shards could not be moved into shared memory: {error}. Is /dev/shm full? "
            "Enlarge it (docker: --shm-size, or mount -o remount,size=)"
        ) from error


def check_free_shm(nbytes: int, who: str) -> None:
    """Raises Unsupported, stating how much is needed, if /dev/shm has fewer than `nbytes` free."""
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise Unsupported(
            f"{who} has to move {nbytes:,} bytes of shards into shared memory, but /dev/shm has {free:,} bytes free. "
            "Enlarge it (docker: --shm-size, or mount -o remount,size=)"
        )


def raise_descriptor_limit(count: int, who: str) -> None:
    """Raises the process's soft limit if necessary so that `count` more descriptors can be open.

    Raises Unsupported, stating how many are needed, if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Unsupported(
            f"{who} has to keep {count:,} more file descriptors open, one per storage of its shards, but its limit is "
            f"{hard:,}. Raise it to {needed:,} (ulimit -n, or docker: --ulimit nofile=)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        _raise_errno()
    return int(mapped)


def _file_system_type(descriptor: int) -> int:
    statfs = (ctypes.c_long * 32)()  # larger than a struct statfs, whose first field is the type
    if _libc.fstatfs(descriptor, statfs):
        _raise_errno()
    return int(statfs[0])


def _raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
