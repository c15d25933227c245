"""What processes leave when they end, however they end: children, descriptors, shared memory, ports.

before = Belongings.of_this_process()
watch = Watch()
watch.look(pids)                    # now and then, while they live
assert watch.left_since(before) == []
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sglang_reshard.patches.shared_segments import segments_of

_SHM = Path("/dev/shm")
_SETTLE_S = 30.0  # for the kernel, and threads that end, on a busy host


def torch_segments() -> set[str]:
    """Names of shared memory that torch has made, in any process of this host."""
    return {name for name in os.listdir(_SHM) if name.startswith("torch")}


def connections(kind: str) -> list[Any]:
    """Returns the sockets of this process. The method has its name from psutil 6 on."""
    me = psutil.Process()
    return list((getattr(me, "net_connections", None) or me.connections)(kind))


@dataclass(frozen=True)
class Belongings:
    """Of this process: its descendants, its descriptors, the ports that it listens on."""

    children: frozenset[int]
    descriptors: int
    ports: frozenset[int]

    @classmethod
    def of_this_process(cls) -> Belongings:
        me = psutil.Process()
        return cls(
            frozenset(child.pid for child in me.children(recursive=True)),
            len(os.listdir("/proc/self/fd")),
            frozenset(c.laddr.port for c in connections("inet") if c.status == psutil.CONN_LISTEN),
        )


@dataclass
class Watch:
    """Follows processes that are about to be killed: afterwards nobody can be asked what was theirs."""

    pids: set[int] = field(default_factory=set)
    segments: set[Path] = field(default_factory=set)

    def look(self, pids: Iterable[int]) -> None:
        now = set(pids)
        self.pids |= now
        self.segments |= segments_of(now)

    def left_since(self, before: Belongings) -> list[str]:
        """What is there of these processes, which have been ended, and what this one has more than before."""
        return settled(lambda: self._left(before))

    def _left(self, before: Belongings) -> list[str]:
        now = Belongings.of_this_process()
        left = [f"process {pid}" for pid in sorted(now.children - before.children)]
        left += [f"process {pid}" for pid in sorted(self.pids - now.children) if psutil.pid_exists(pid)]
        if now.descriptors > before.descriptors:
            left.append(f"{now.descriptors - before.descriptors} descriptors")
        left += [f"port {port}" for port in sorted(now.ports - before.ports)]
        theirs = {f for pid in self.pids for f in _SHM.glob(f"torch_{pid}_*")} | self.segments
        left += [str(segment) for segment in sorted(theirs) if segment.exists()]
        return left


def mapped_from(pid: int, others: Iterable[int]) -> int:
    """How many shared mappings a process has of memory that torch shared in these other processes."""
    names = "|".join(str(other) for other in others)
    return len(re.findall(rf"torch_(?:{names})_", Path(f"/proc/{pid}/maps").read_text())) if names else 0


def settled(left: Callable[[], list[str]]) -> list[str]:
    """What is left for longer than things may take to go."""
    end = time.monotonic() + _SETTLE_S
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
