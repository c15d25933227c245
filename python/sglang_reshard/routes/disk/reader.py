"""Opens the files of a snapshot on an engine rank, and reads boxes of tensors from them.

Files are opened once and read by descriptor: a folder that is deleted or replaced during a read changes nothing. They
are not mapped, so that a file that is truncated is an error and no SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from sglang_reshard.errors import Aborted, Mismatch, ReshardError
from sglang_reshard.regular_files import FOLDER_FLAGS, open_regular
from sglang_reshard.routes.disk.messages import DiskFile, DiskFiles

_PART = 1 << 24  # bytes that are read at once


class Run(NamedTuple):
    """Consecutive bytes of a file, and where they go. buffer: uint8, of as many bytes"""

    file: int
    offset: int
    buffer: np.ndarray


class OpenFiles:
    """The files of a snapshot that an engine rank reads."""

    def __init__(self, files: DiskFiles, needed: Iterable[int]) -> None:
        """Raises Mismatch for a file that is missing, or is not the one that `files` describes."""
        self._files, self._folder = files, Path(files.folder)
        self._opened: dict[int, tuple[BinaryIO, tuple[int, int]]] = {}
        self._ended = ""
        try:
            with self._errors(""):
                folder = os.open(self._folder, FOLDER_FLAGS)
                try:
                    for number in sorted(set(needed)):
                        self._opened[number] = self._open(folder, files.files[number])
                finally:
                    os.close(folder)
        except BaseException:
            self.close()
            raise

    def read(self, run: Run) -> None:
        """Fills the run's buffer. Raises Mismatch for a file that ends before, and Aborted after `abort`."""
        descriptor = self._opened[run.file][0].fileno()
        view, offset = run.buffer.data, run.offset
        with self._errors(self._files.files[run.file].name):
            while view:
                if self._ended:
                    raise Aborted(self._ended)
                count = os.preadv(descriptor, [view[:_PART]], offset)
                if not count:
                    raise Mismatch(f"{self._where(run.file)} was truncated while it was read")
                view, offset = view[count:], offset + count

    def read_all(self, runs: Iterable[Run]) -> None:
        """As `read`, for several. May be called from several threads."""
        for run in runs:
            self.read(run)

    def check_unchanged(self) -> None:
        """Raises Mismatch for a file that was written since it was opened."""
        for number, (opened, state) in self._opened.items():
            if _state(os.fstat(opened.fileno())) != state:
                raise Mismatch(f"{self._where(number)} was written while it was read")

    def abort(self) -> None:
        """Ends reads. May be called from any thread."""
        self._ended = "the update has ended"

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1][0].close()

    def _open(self, folder: int, file: DiskFile) -> tuple[BinaryIO, tuple[int, int]]:
        where = str(self._folder / file.name)
        opened, found = open_regular(folder, file.name, where)
        try:
            if found.st_size != file.nbytes:
                raise Mismatch(f"{where} has {found.st_size} bytes, but its manifest lists {file.nbytes}")
            if hashlib.sha256(os.pread(opened.fileno(), file.header_bytes, 0)).hexdigest() != file.header:
                raise Mismatch(f"{where} was replaced: its table of tensors is not the one that the server has read")
        except BaseException:
            opened.close()
            raise
        return opened, _state(found)

    def _where(self, number: int) -> str:
        return str(self._folder / self._files.files[number].name)

    @contextlib.contextmanager
    def _errors(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise Mismatch(f"{error.filename or self._folder / file} is missing on this host") from error
        except OSError as error:
            raise ReshardError(f"{self._folder / file} cannot be read: {type(error).__name__}: {error}") from error


def _state(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
