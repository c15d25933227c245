"""Opening the memory that another process announced: that very file, and nothing that it could stand for.

A descriptor's number is of whatever its process has there by now. So what is found under it is looked at
before it is opened for reading, and what was looked at is what is mapped.
"""

from __future__ import annotations

import ctypes
import os
import stat

from sglang_reshard.errors import Mismatch

_TMPFS_MAGIC = 0x01021994  # of /dev/shm and of memfd_create

_libc = ctypes.CDLL(None, use_errno=True)


def open_shared(pid: int, fd: int, inode: int, nbytes: int) -> int:
    """A descriptor, for reading, of the nameless file in memory that process `pid` has open as `fd`. To be closed.

    Raises OSError where it cannot be opened, and Mismatch where it is not the file announced: a regular file in
    memory, without a name, of this inode and exactly so many bytes.
    """
    # Only looked up: to open a device, or a pipe, may do something, and may wait for ever.
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or _kind_of_file_system(found) != _TMPFS_MAGIC:
            raise Mismatch(f"descriptor {fd} of process {pid} is no shared memory without a name")
        if (status.st_ino, status.st_size) != (inode, nbytes):
            raise Mismatch(
                f"descriptor {fd} of process {pid} has inode {status.st_ino} and {status.st_size:,} bytes, not "
                f"inode {inode} and {nbytes:,} bytes"
            )
        # Without waiting for whoever holds a lease on it.
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(found)


def _kind_of_file_system(descriptor: int) -> int:
    about = (ctypes.c_long * 32)()  # a struct statfs, which begins with its type, is smaller
    if _libc.fstatfs(descriptor, about):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(about[0])
