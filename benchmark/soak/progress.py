"""One line of progress: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from benchmark.soak.clients import Tally

_STILL_EVERY_S = 30.0


class Progress:
    """Use as a context; `show` is called again and again while updates run."""

    def __init__(self, console: Console, updates: int) -> None:
        self._console = console
        self._updates = updates
        self._begin = self._said = time.monotonic()
        self._bars = Bars(
            TextColumn("updates"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[clients]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bars.add_task("", total=updates, clients="")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, version: int, tallies: Sequence[Tally]) -> None:
        answered = sum(len(t.seconds) for t in tallies)
        clients = f"{answered:,} requests answered, {sum(t.failures for t in tallies)} failed"
        self._bars.update(self._task, completed=version, clients=clients)
        if not self._console.is_terminal and time.monotonic() - self._said > _STILL_EVERY_S:
            self.say(f"{version} of {self._updates} updates, {clients}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._said = time.monotonic()
        self._console.print(
            f"[{self._said - self._begin:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )
