"""Copies between paths, so that the limit is of the same minutes as the paths, and of the same load by others.

Trainer rank 0 asks through a file and waits; the launcher, which follows the trainer ranks, has the copiers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmark.copying import Copiers

COPIES = 4  # after each path
_ASKED, _DONE = "copies-asked", "copies-done"
_DEADLINE_S = 300.0


def ask_for_copies(folder: Path, bytes_per_rank: Sequence[int]) -> None:
    """Return when they have been made."""
    partial = folder / f"{_ASKED}.partial"
    partial.write_bytes(msgspec.json.encode(list(bytes_per_rank)))
    os.replace(partial, folder / _ASKED)
    end = time.monotonic() + _DEADLINE_S
    while not (folder / _DONE).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the launcher made no copies within {_DEADLINE_S:.0f} s")
        time.sleep(0.05)
    (folder / _DONE).unlink()


class Interludes:
    """The launcher's side. `poll` it often; seconds of all copies are in `seconds`."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._copiers: Copiers | None = None
        self.seconds: list[float] = []

    def poll(self) -> None:
        asked = self._folder / _ASKED
        if not asked.exists():
            return
        bytes_per_rank = msgspec.json.decode(asked.read_bytes(), type=list[int])
        asked.unlink()
        self._copiers = self._copiers or Copiers(bytes_per_rank, self._device)
        self.seconds += [self._copiers.seconds() for _ in range(COPIES)]
        (self._folder / _DONE).touch()

    def close(self) -> None:
        if self._copiers is not None:
            self._copiers.close()
