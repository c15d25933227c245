"""Which version is due: sixteen bytes that trainer rank 0 writes and clients read, at the cost of neither."""

from __future__ import annotations

from pathlib import Path

import torch


class Standing:
    """The file is made where there is none; all who name it see the same.

    begun     the version of the last update that trainer rank 0 has begun: no answer may be of a later one
    returned  the version of the last update that has returned: a request that begins now gets it, or a later one
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._begun, self._returned = torch.from_file(str(file), shared=True, size=2, dtype=torch.int64)

    @property
    def begun(self) -> int:
        return int(self._begun)

    @begun.setter
    def begun(self, version: int) -> None:
        self._begun.fill_(version)

    @property
    def returned(self) -> int:
        return int(self._returned)

    @returned.setter
    def returned(self, version: int) -> None:
        self._returned.fill_(version)
