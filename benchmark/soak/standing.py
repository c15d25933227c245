"""Which version is due: sixteen bytes that trainer rank 0 writes and clients read, at the cost of neither."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_INTEGER = struct.Struct("q")


class Standing:
    """The file is made where there is none; all who name it see the same.

    begun     the version of the last update that trainer rank 0 has begun: no answer may be of a later one
    returned  the version of the last update that has returned: a request that begins now gets it, or a later one
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        if not file.exists():
            file.write_bytes(bytes(2 * _INTEGER.size))
        with file.open("r+b") as f:
            self._memory = mmap.mmap(f.fileno(), 2 * _INTEGER.size)

    @property
    def begun(self) -> int:
        return _INTEGER.unpack_from(self._memory, 0)[0]

    @begun.setter
    def begun(self, version: int) -> None:
        _INTEGER.pack_into(self._memory, 0, version)

    @property
    def returned(self) -> int:
        return _INTEGER.unpack_from(self._memory, _INTEGER.size)[0]

    @returned.setter
    def returned(self, version: int) -> None:
        _INTEGER.pack_into(self._memory, _INTEGER.size, version)
