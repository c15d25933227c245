"""Events of a run's processes for the launcher: JSON lines in a file that it follows.

A file, not a pipe: the engine's processes inherit all that their parent has open, and a pipe that one of
them holds never ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A phase begins. usual_s: about how many seconds it takes on two cores; 0 if that is not worth saying."""

    phase: str
    usual_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    phase: str
    seconds: float
    note: str = ""


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str


class Row(msgspec.Struct, frozen=True, tag="row"):
    """A row of the final table: one step of a run.

    right   whether it is as it should be; None for a figure that nothing is held against
    route   that moved the weights; empty if none did
    nbytes  that were moved
    seconds of the slowest trainer rank
    limit   seconds of a plain copy of as many bytes, in the same run
    stock   seconds of SGLang's own update, in the same run
    why     what is wrong, and what to try next; or a remark
    more    other figures, for the line of JSON
    """

    run: str
    step: str
    right: bool | None = None
    route: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    limit: float = 0.0
    stock: float = 0.0
    why: str = ""
    more: dict[str, float | int | str] = {}


Event = Started | Finished | Note | Row


class EventWriter:
    """Appends events to a file; without one it drops them, as on the trainer ranks that do not report."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        if self._path is not None:
            with self._path.open("ab") as f:
                f.write(msgspec.json.encode(event) + b"\n")

    @contextmanager
    def phase(self, name: str, usual_s: float = 0.0) -> Iterator[list[str]]:
        """Reports a phase around the body; what the body appends to the list becomes the closing note."""
        self.write(Started(name, usual_s))
        notes: list[str] = []
        begin = time.perf_counter()
        yield notes
        self.write(Finished(name, time.perf_counter() - begin, ", ".join(notes)))


class EventReader:
    """Follows a file of events that may not exist yet and whose last line may be half written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Event]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as f:
            f.seek(self._offset)
            data = f.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        decoder = msgspec.json.Decoder(Event)
        return [decoder.decode(line) for line in complete.splitlines()]
