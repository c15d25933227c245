"""What a process holds, as the kernel tells."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Footprint(msgspec.Struct, frozen=True):
    """held_bytes      resident memory without pages of files: those the kernel drops and reads again as it likes
    resident_bytes  with them
    maps            mapped regions
    """

    held_bytes: int
    resident_bytes: int
    threads: int
    descriptors: int
    maps: int


def footprint(pid: int) -> Footprint:
    """Of a process that lives and is ours; raises OSError otherwise."""
    proc = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return Footprint(
        held_bytes=_bytes(status["RssAnon"]) + _bytes(status["RssShmem"]),
        resident_bytes=_bytes(status["VmRSS"]),
        threads=int(status["Threads"]),
        descriptors=len(os.listdir(proc / "fd")),
        maps=(proc / "maps").read_bytes().count(b"\n"),
    )


def shared_memory_bytes() -> int:
    """What all files in /dev/shm take, of whichever process."""
    shm = os.statvfs("/dev/shm")
    return (shm.f_blocks - shm.f_bfree) * shm.f_frsize


def _bytes(field: str) -> int:
    number, unit = field.split()
    assert unit == "kB"
    return int(number) * 1024
