"""Named shared memory that processes leave behind when they are killed, as SGLang ends its own.

Python's SharedMemory and its locks are files in /dev/shm, removed by their creator or by its resource
tracker. SGLang kills both: every engine start would leave a segment of 25 MB and some semaphores. From 0.5.13 SGLang
adds a file of its own, of 16 KB, in which the schedulers say how loaded they are.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path

_ENGINES = "sglang_loads_"
_NAMED = re.compile(rf"(/dev/shm/(?:psm_|sem\.mp-|{_ENGINES})\S+)$", re.MULTILINE)


def segments_of(pids: Iterable[int]) -> set[Path]:
    """What these processes have mapped of the kinds that Python and SGLang make. To be asked while they live."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours to look at
            found.update(map(Path, _NAMED.findall(Path(f"/proc/{pid}/maps").read_text())))
    return found


def is_an_engines(segment: Path) -> bool:
    """Whether it is of no use to anybody else, also where the process that embeds the engine has mapped it."""
    return segment.name.startswith(_ENGINES)


def remove(segments: Iterable[Path]) -> None:
    """Remove segments whose processes have ended; those that are gone already are no error."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def forget(segments: Iterable[Path]) -> None:
    """Take segments that this process's children made off its own resource tracker's list."""
    for segment in segments:
        if segment.name.startswith("psm_"):
            resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        elif segment.name.startswith("sem."):
            resource_tracker.unregister(f"/{segment.name.removeprefix('sem.')}", "semaphore")
