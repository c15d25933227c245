"""What a process has given to its GPUs, stream by stream: it is done when somebody waits for it, and not before.

Of all orders in which real GPUs may do it, this is the most unkind to who has forgotten to wait. Within a stream work
is done in order; a stream waits for another one only where it was told to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Key(NamedTuple):
    """A stream: number of the GPU on the host, and of the stream there; 0 is the default one."""

    gpu: int
    stream: int


class Point(NamedTuple):
    """All that a stream had been given until then."""

    key: Key
    given: int


class Streams:
    """Those of one process. `lock` is held while work is done."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock = lock
        self._given: dict[Key, int] = {}
        self._left: dict[Key, deque[Callable[[], object]]] = {}
        self._thread = threading.local()

    def give(self, key: Key, work: Callable[[], object]) -> None:
        with self._lock:
            self._given[key] = self._given.get(key, 0) + 1
            self._left.setdefault(key, deque()).append(work)

    def point(self, key: Key) -> Point:
        with self._lock:
            return Point(key, self._given.get(key, 0))

    def is_done(self, point: Point) -> bool:
        with self._lock:
            return self._given.get(point.key, 0) - len(self._left.get(point.key, ())) >= point.given

    def is_busy(self, gpu: int) -> bool:
        with self._lock:
            return any(left for key, left in self._left.items() if key.gpu == gpu)

    @property
    def are_idle(self) -> bool:
        return not any(self._left.values())

    @property
    def is_doing(self) -> bool:
        """Whether the calling thread is doing such work just now."""
        return getattr(self._thread, "depth", 0) > 0

    def finish(self, point: Point) -> None:
        """Does what a stream was given until then."""
        with self._lock:
            left = self._left.get(point.key)
            self._thread.depth = getattr(self._thread, "depth", 0) + 1
            try:
                while left and not self.is_done(point):
                    left.popleft()()
            finally:
                self._thread.depth -= 1

    def finish_stream(self, key: Key) -> None:
        self.finish(self.point(key))

    def finish_gpu(self, gpu: int) -> None:
        """Does all that a GPU was given: first what was given to its default stream."""
        with self._lock:
            for key in sorted(key for key in self._left if key.gpu == gpu):
                self.finish_stream(key)

    def wait(self, key: Key, point: Point) -> None:
        """Lets a stream wait for what another one has been given."""
        if point.key != key:
            self.give(key, lambda: self.finish(point))
