"""Removes named shared memory that processes leave behind when they are killed, which is how SGLang ends its own.

Python's SharedMemory and its locks are files in /dev/shm, removed by their creator or by its resource tracker. SGLang
kills both: every engine start would leave a segment of 25 MB and some semaphores. From 0.5.13 SGLang adds another file
of 16 KB, where the schedulers publish their load.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path

_LOAD_FILES = "sglang_loads_"
_NAMED = re.compile(rf"(/dev/shm/(?:psm_|sem\.mp-|{_LOAD_FILES})\S+)$", re.MULTILINE)


def segments_of(pids: Iterable[int]) -> set[Path]:
    """Returns the named segments of Python and SGLang that these processes have mapped. Call it while they run."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            found.update(map(Path, _NAMED.findall(Path(f"/proc/{pid}/maps").read_text())))
    return found


def is_engine_only(segment: Path) -> bool:
    """Returns True if only the engine uses it, even if the process that embeds the engine has mapped it too."""
    return segment.name.startswith(_LOAD_FILES)


def remove(segments: Iterable[Path]) -> None:
    """Unlinks segments whose processes have ended; ignores those that do not exist."""
    for segment in segments:
        segment.unlink(missing_ok=True)


def unregister(segments: Iterable[Path]) -> None:
    """Unregisters segments that this process's children created from its own resource tracker."""
    for segment in segments:
        if segment.name.startswith("psm_"):
            resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        elif segment.name.startswith("sem."):
            resource_tracker.unregister(f"/{segment.name.removeprefix('sem.')}", "semaphore")
