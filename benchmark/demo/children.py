"""A child process and all that it started: followed, and ended without leaving anything behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.patches.shared_segments import remove, segments_of

_POLL_S = 0.2
_CENSUS_EVERY_S = 2.0
# torchrun needs a moment to end its workers, and they theirs to end the engine.
_GRACE_S = 10.0
_TAIL_LINES = 40


def run(command: list[str], environment: dict[str, str], log: Path, deadline: float, poll: Callable[[], None]) -> None:
    """Run `command` with its output in `log`, calling `poll` meanwhile; raise when it fails.

    deadline: a time.monotonic() after which it is ended. Whatever ends this function, the command and its
    descendants are gone afterwards.
    """
    with started(command, environment, log) as child:
        while child.process.poll() is None:
            child.census()
            poll()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the deadline passed while this was running: {' '.join(command[:4])} ... Give a slow "
                    f"machine more time with --deadline-s.\n{tail(log)}"
                )
            time.sleep(_POLL_S)
        poll()
    if child.process.returncode:
        raise ReshardError(f"a process of the demo ended with exit status {child.process.returncode}.\n{tail(log)}")


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[Family]:
    """Starts a command with its output in `log`, and ends it with its descendants. Count these often, by `census`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    family = Family(process)
    try:
        yield family
    finally:
        family.end()


def torchrun(ranks: int, module: str, job: msgspec.Struct) -> list[str]:
    """Returns the command that runs a module on so many ranks, with the JSON of its job."""
    ranked = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]  # a free port of its own choice
    return [sys.executable, *ranked, "-m", module, msgspec.json.encode(job).decode()]


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """So that being told to end ends the children too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tail(log: Path) -> str:
    lines = _without_torchrun(log.read_text(errors="replace").splitlines())
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines[-_TAIL_LINES:])])


def _without_torchrun(lines: list[str]) -> list[str]:
    """Leaves out the traceback with which torchrun itself ends: 40 lines that say only that a rank failed."""
    for number, line in enumerate(lines):
        if line.startswith("torch.distributed.elastic.multiprocessing.errors.ChildFailedError"):
            begin = max((i for i in range(number) if lines[i].startswith("Traceback ")), default=number)
            return lines[:begin]
    return lines


class Family:
    """Descendants, counted while their parents live.

    torchrun gives each worker a session of its own, so no single process group holds them all, and the
    engine's processes lose their parent when a worker dies. psutil knows a process by its start time
    too, so that a number used again is not mistaken for one of them.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._root = psutil.Process(process.pid)
        self._members: set[psutil.Process] = set()
        self._segments: set[Path] = set()
        self._next = 0.0

    def census(self) -> None:
        if time.monotonic() >= self._next:
            with contextlib.suppress(psutil.Error):
                self._members.update(self._root.children(recursive=True))
            # While they live: an engine that crashes is killed by SGLang before anyone can ask it.
            self._segments |= segments_of(member.pid for member in self._members if member.is_running())
            self._next = time.monotonic() + _CENSUS_EVERY_S

    def end(self) -> None:
        process, self._next = self.process, 0.0
        self.census()
        if process.poll() is None:
            process.terminate()  # torchrun passes it on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        for member in [*self._members]:
            with contextlib.suppress(psutil.Error):
                self._members.update(member.children(recursive=True))
        self._segments |= segments_of(member.pid for member in self._members if member.is_running())
        for member in self._members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        if process.poll() is None:
            process.kill()
        process.wait()
        remove(self._segments)
