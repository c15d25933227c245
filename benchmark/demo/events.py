"""What the demo's processes tell the launcher: JSON lines in a file that it follows.

A file, not a pipe: the engine's processes inherit whatever their parent has open, and a pipe that one of
them holds never ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sglang_reshard.observability.report import UpdateReport

Tokens = list[list[int]]

# Begun by the launcher, ended by trainer rank 0.
TRAINER_START = "start the trainer ranks under torchrun"


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A phase begins; `usual_s` is how long it takes on two cores, 0 when not worth saying."""

    phase: str
    usual_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """seconds is None when who ends the phase did not begin it."""

    phase: str
    seconds: float | None
    note: str = ""


class Note(msgspec.Struct, frozen=True, tag="note"):
    text: str


class Updated(msgspec.Struct, frozen=True, tag="updated"):
    """One update and what was seen around it. Tokens are the continuations of the prompts, greedy.

    dtype       the engine's
    checkpoint  folder of the trainer's weights at this step
    reference   tokens of transformers with that checkpoint
    before      tokens of the engine before the update; none before its first one
    after       tokens of the engine after the update
    lead        the smallest lead of a chosen token's logit in `reference` over the next best
    live        per engine rank, tensor name -> digest of what is in its memory after the update
    said        `after` of the first prompt, as text
    """

    dtype: str
    checkpoint: str
    report: UpdateReport
    reference: Tokens
    before: Tokens
    after: Tokens
    lead: float
    live: list[dict[str, str]]
    said: str = ""


Event = Started | Finished | Note | Updated


class EventWriter:
    """Appends events to a file; with no file it drops them, as on the trainer ranks that do not report."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: Event) -> None:
        if self._path is not None:
            with self._path.open("ab") as f:
                f.write(msgspec.json.encode(event) + b"\n")

    def note(self, text: str) -> None:
        self.write(Note(text))

    @contextmanager
    def phase(self, name: str, usual_s: float = 0.0) -> Iterator[list[str]]:
        """Report a phase around the body; what the body appends to the list becomes the closing note."""
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
