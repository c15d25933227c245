"""Whether a process has room to hand its memory over: in shared memory, and for the descriptors that it keeps open."""

from __future__ import annotations

import os
import resource

from sglang_reshard.errors import Unsupported

_SPARE = 64  # descriptors that whatever else runs in the process may want meanwhile


def check_shared_memory(nbytes: int, who: str) -> None:
    """Raise Unsupported, saying how much is needed, when /dev/shm has no room for so many bytes more."""
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    if free < nbytes:
        raise Unsupported(
            f"{who} has to move {nbytes:,} bytes of shards into shared memory, but /dev/shm has {free:,} bytes free; "
            "enlarge it (docker: --shm-size, or mount -o remount,size=)"
        )


def make_descriptors(count: int, who: str) -> None:
    """Raise this process's own limit, where it has to be, so that `count` more descriptors can be open.

    Raises Unsupported, saying how many are needed, when the system allows no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise Unsupported(
            f"{who} has to keep {count:,} more file descriptors open, one for each storage of its shards, but may have "
            f"{hard:,} in all; raise that limit to {needed:,} (ulimit -n, or docker: --ulimit nofile=)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
