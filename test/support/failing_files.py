"""Lets the nth operation on files of a folder fail, by Python's own audit events: whatever code it is in."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_EVENTS = frozenset(
    {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.scandir", "os.listdir",
     "fcntl.flock"}
)  # fmt: skip
_CALLS = ("fsync", "posix_fallocate", "stat", "lstat", "fstat")  # of os, which have no event


class FailingFiles:
    """Counts operations while it is armed.

    at    number of the one that fails; 0 for none
    dead  all after it fail as well, as if the process had died there
    """

    def __init__(self) -> None:
        self._folder, self._armed, self.at, self.dead, self.count = "", False, 0, False, 0
        sys.addaudithook(self._hear)  # for the life of the process; it does nothing unless armed

    @contextmanager
    def armed(self, folder: Path, at: int, *, dead: bool) -> Iterator[None]:
        self._folder, self.at, self.dead, self.count = str(folder), at, dead, 0
        with patch.multiple(os, **{name: self._failing(name, getattr(os, name)) for name in _CALLS}):
            self._armed = True
            try:
                yield
            finally:
                self._armed = False

    @property
    def struck(self) -> bool:
        return 0 < self.at <= self.count

    def _failing(self, name: str, call: Any) -> Any:
        def failing(*args: Any, **kwargs: Any) -> Any:
            if name in ("fsync", "posix_fallocate", "fstat") or self._is_ours(args[:1]):
                self._step()
            return call(*args, **kwargs)

        return failing

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._armed and event in _EVENTS and (event == "fcntl.flock" or self._is_ours(args)):
            self._step()

    def _is_ours(self, args: tuple[Any, ...]) -> bool:
        path = args[0] if args else None
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, (str, Path)):
            return False
        return str(path).startswith(self._folder) or not os.path.isabs(path)  # relative: to an open folder

    def _step(self) -> None:
        if not self._armed:
            return
        self.count += 1
        if self.at and (self.count == self.at or (self.dead and self.count > self.at)):
            raise OSError(errno.EIO, f"operation {self.count} fails")
