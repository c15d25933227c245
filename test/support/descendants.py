"""A command and all that it starts, however detached: followed, and ended without leaving anything behind.

Ray starts daemons that outlive the process they come from, and workers in sessions of their own. While a
command runs, this process adopts whatever of its descendants loses its parent, so that none can get lost.
Linux only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

from sglang_reshard.patches.shared_segments import remove
from support.left_behind import Watch
from support.zygote import as_subreaper

_SHM = Path("/dev/shm")
_POLL_S, _CENSUS_EVERY_S = 0.2, 2.0


class Deadline(AssertionError):
    """The command ran longer than it may."""


def run(command: list[str], environment: dict[str, str], folder: Path, log: Path, timeout_s: float) -> int:
    """The exit status of `command`, run in `folder` with its output in `log`.

    Raises Deadline when it takes longer than `timeout_s`. Either way every process that came of it is gone
    afterwards, and so is the shared memory that they made.
    """
    end = time.monotonic() + timeout_s
    with as_subreaper(), log.open("ab") as out:
        family = _Family()
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        family.command = process.pid
        try:
            while process.poll() is None:
                family.census()
                if time.monotonic() > end:
                    raise Deadline(f"not done after {timeout_s:g} s: {' '.join(command[:4])} ...")
                time.sleep(_POLL_S)
        finally:
            family.end(process)
    return process.returncode


class _Family:
    """All processes below this one, except those that were there before."""

    def __init__(self) -> None:
        self._strangers = set(psutil.Process().children(recursive=True))
        self._watch = Watch()
        self._next = 0.0
        self.command = 0

    def members(self) -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - self._strangers

    def census(self) -> None:
        """What they have mapped has to be asked while they live."""
        if time.monotonic() < self._next:
            return
        self._reap()
        self._watch.look(member.pid for member in self.members())
        self._next = time.monotonic() + _CENSUS_EVERY_S

    def _reap(self) -> None:
        """Lets those end that this process has adopted: whoever waits for them cannot."""
        for child in set(psutil.Process().children()) - self._strangers:
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.pid != self.command and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        self._next = 0.0
        self.census()
        process.poll()
        while members := self.members():  # also those that they start meanwhile
            for member in members:
                with contextlib.suppress(psutil.Error):
                    member.kill()
                # It counts until it is reaped, by us once its parent has gone.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(member.pid, os.WNOHANG)
            time.sleep(0.05)
        remove(self._watch.segments)
        # torch's, named after the process that made them; their own manager was killed as well.
        remove(f for pid in self._watch.pids for f in _SHM.glob(f"torch_{pid}_*"))


def clean_environment() -> dict[str, str]:
    """This process's variables without those that would lead Ray or verl astray."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VERL_")) and k != "CUDA_VISIBLE_DEVICES"}
