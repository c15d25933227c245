"""How much a hub keeps for others, and until when."""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol

DEFAULT_STORED_BYTES = 4 * 2**30
MAX_NAMES = 1_000_000  # keys, scopes and gathers of all sessions
MAX_NAME_CHARACTERS = 1024
MAX_REASON_CHARACTERS = 64 * 1024
MAX_WAITS = 4096  # of one line at a time
_NAME_BYTES = 256  # about what Python takes for an entry of a dictionary

_LONGEST_S = 1e8


class QuotaExceeded(Exception):
    """The message says which limit, for the one who asked."""


class MemoryQuota:
    """Bytes and names that all sessions of a hub hold together."""

    def __init__(self, stored_bytes: int = DEFAULT_STORED_BYTES, names: int = MAX_NAMES) -> None:
        self._most_bytes, self._most_names = stored_bytes, names
        self.stored_bytes = self.names = 0

    def take(self, size: int, names: int = 0) -> None:
        """Account for `size` bytes more (or fewer) and so many names. Raises OverLimit, and takes nothing then."""
        size += names * _NAME_BYTES
        if size > 0 and self.stored_bytes + size > self._most_bytes:
            raise QuotaExceeded(f"the hub would hold more than {self._most_bytes} bytes")
        if names > 0 and self.names + names > self._most_names:
            raise QuotaExceeded(f"the hub would hold more than {self._most_names} names")
        self.stored_bytes += size
        self.names += names


def check_name(*names: str) -> None:
    for name in names:
        if len(name) > MAX_NAME_CHARACTERS:
            raise QuotaExceeded(f"a name of {len(name)} characters, {name[:80]}...; at most {MAX_NAME_CHARACTERS}")


class Timer(Protocol):
    """Something that waits. `over` once it does not any more."""

    over: bool

    def expire(self) -> None: ...


class TimerHeap:
    """What waits, by when its time is up. Most of it never comes to that."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._compact_at = 64

    def add(self, now: float, timeout_s: float, item: Timer) -> None:
        if not timeout_s >= 0:  # NaN too
            timeout_s = 0.0
        heapq.heappush(self._heap, (now + min(timeout_s, _LONGEST_S), next(self._order), item))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if not entry[2].over]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 64

    def expire(self, now: float) -> None:
        while self._heap and (self._heap[0][2].over or self._heap[0][0] <= now):
            item = heapq.heappop(self._heap)[2]
            if not item.over:
                item.expire()

    def next(self) -> float | None:
        """When `expire` should be called again."""
        return self._heap[0][0] if self._heap else None
