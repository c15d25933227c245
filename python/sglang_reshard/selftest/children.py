"""Child processes and all that they started: followed, and ended without leaving anything behind."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.patches.shared_segments import remove, segments_of

_POLL_S = 0.2
_CENSUS_EVERY_S = 2.0
_GRACE_S = 10.0  # ranks need a moment to end the engine
_TAIL_LINES = 40


class Family:
    """Processes and their descendants, counted while their parents live.

    An engine's processes lose their parent when it dies, and have separate sessions. psutil knows a process by its
    start time too, so that a number used again is not mistaken for one of them.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self._roots = [psutil.Process(process.pid) for process in processes]
        self._members: set[psutil.Process] = set()
        self._segments: set[Path] = set()
        self._next = 0.0

    def census(self) -> None:
        if time.monotonic() >= self._next:
            for root in self._roots:
                with contextlib.suppress(psutil.Error):
                    self._members.update(root.children(recursive=True))
            # While they live: an engine that crashes is killed by SGLang before anyone can ask it.
            self._segments |= segments_of(member.pid for member in self._members if member.is_running())
            self._next = time.monotonic() + _CENSUS_EVERY_S

    def end(self) -> None:
        self._next = 0.0
        self.census()
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        for member in [*self._members]:
            with contextlib.suppress(psutil.Error):
                self._members.update(member.children(recursive=True))
        self._segments |= segments_of(member.pid for member in self._members if member.is_running())
        for member in self._members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in self.processes:
            process.kill()
            process.wait()
        remove(self._segments)


def run(command: list[str], environment: dict[str, str], log: Path, deadline: float, poll: Callable[[], None]) -> None:
    """Runs a command with its output in `log`, and calls `poll` while it runs.

    deadline  a time.monotonic() after which it is ended

    Raises ReshardError when it fails, and DeadlineExceeded. The command and its descendants are
    gone afterwards, however this function ends.
    """
    with started(command, environment, log) as family:
        wait(family, log, deadline, poll)


def run_ranks(
    ranks: int,
    module: str,
    job: msgspec.Struct,
    environment: dict[str, str],
    log: Path,
    deadline: float,
    poll: Callable[[], None],
) -> None:
    """Runs a module on so many trainer ranks of this host, with the JSON of its job; see `run`."""
    with started_ranks(ranks, module, job, environment, log) as family:
        wait(family, log, deadline, poll)


def wait(family: Family, log: Path, deadline: float, poll: Callable[[], None]) -> None:
    """Waits until all have ended, or one has failed. Raises ReshardError then, and DeadlineExceeded."""
    while any(process.poll() is None for process in family.processes):
        family.census()
        poll()
        _check(family, log)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the deadline passed. Give a slow machine more time.\n{tail(log)}")
        time.sleep(_POLL_S)
    poll()
    _check(family, log)


def _check(family: Family, log: Path) -> None:
    for number, process in enumerate(family.processes):
        if process.returncode:
            which = f"trainer rank {number}" if len(family.processes) > 1 else "a process"
            raise ReshardError(f"{which} ended with exit status {process.returncode}.\n{tail(log)}")


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[Family]:
    """Starts a command with its output in `log`, and ends it with its descendants. Count these often, by `census`."""
    with _ended(Family([_process(command, environment, log)])) as family:
        yield family


@contextlib.contextmanager
def started_ranks(
    ranks: int, module: str, job: msgspec.Struct, environment: dict[str, str], log: Path
) -> Iterator[Family]:
    """Starts a module on so many trainer ranks, each with torch's variables; see `started`.

    torchrun would end all of them when one is killed.
    """
    command = [sys.executable, "-m", module, msgspec.json.encode(job).decode()]
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with _ended(Family([_process(command, environment | there | variables, log) for variables in own])) as family:
        yield family


def _process(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


@contextlib.contextmanager
def _ended(family: Family) -> Iterator[Family]:
    try:
        yield family
    finally:
        family.end()


def torchrun(ranks: int, module: str, job: msgspec.Struct) -> list[str]:
    """Returns the command that runs a module on so many ranks, with the JSON of its job."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launcher, "-m", module, msgspec.json.encode(job).decode()]


def free_port() -> int:
    """Returns a free port for a server. Another 10,000 above it exists, too: SGLang serves gRPC there.

    The port is below the kernel's range for clients' connections, unless that range begins too low.
    """
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = first_of_clients - 10_000 if first_of_clients > 21_000 else 50_000
    while True:
        port = 10_000 + secrets.randbelow(end - 10_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


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
