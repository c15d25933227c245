"""Progress of all processes, drawn from one place: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from sglang_reshard.selftest.events import Event, Finished, Note, Row, Started

# In a log, a phase that goes on says so this often.
_STILL_EVERY_S = 30.0


class Progress:
    """Use as a context; hand it events with `show`, and call `tick` often."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._begin = self._said = time.monotonic()
        self._running: dict[str, tuple[float, TaskID]] = {}
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[usual]}"),
            console=console,
            disable=not self._live,
            transient=True,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, event: Event) -> None:
        match event:
            case Started(phase=phase, usual_s=usual_s):
                usual = f"about {usual_s:.0f} s on two cores" if usual_s else ""
                task = self._bars.add_task(escape(phase), total=None, usual=usual)
                self._running[phase] = time.monotonic(), task
                # A short phase is told once, when it is over.
                if not self._live and usual:
                    self._line(f"{phase} ... {usual}")
            case Finished(phase=phase, seconds=seconds, note=note):
                _, task = self._running.pop(phase)
                self._bars.remove_task(task)
                self._line(f"{phase}: {seconds:.1f} s  {note}".rstrip())
            case Note(text=text):
                self._line(text)
            case Row():
                pass  # for the table

    def tick(self) -> None:
        now = time.monotonic()
        if not self._live and self._running and now - self._said > _STILL_EVERY_S:
            for phase, (begin, _) in self._running.items():
                self._line(f"{phase}: {now - begin:.0f} s so far")

    def _line(self, text: str) -> None:
        """A line that stays; on a terminal the spinner goes on below it."""
        self._said = time.monotonic()
        self._console.print(
            f"[{self._said - self._begin:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )
