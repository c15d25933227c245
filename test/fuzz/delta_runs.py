"""Runs cases of damaged deltas in processes of their own, of which one that is ended by a signal has failed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
KINDS = ("section", "file")
_POLL_S = 0.1


class Outcome(NamedTuple):
    """What became of the cases of one kind. failures: what went wrong, and the command that shows it again."""

    kind: str
    cases: int
    refused: int
    applied: int
    seconds: float
    failures: list[str]


def run_cases(kind: str, seed: int, cases: int, processes: int, deadline_s: float) -> Outcome:
    """Runs cases 0 to `cases` of a kind in so many processes."""
    edges = [cases * n // processes for n in range(processes + 1)]
    refused, applied, seconds, failures = 0, 0, 0.0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = [_start(kind, seed, a, b, folder) for a, b in itertools.pairwise(edges)]
        try:
            ended = _wait(running, deadline_s)
        finally:
            for process in running:
                process.kill()
                process.wait()
        for first, process, in_time in zip(edges, running, ended, strict=False):
            said = (folder / f"{first}.out").read_text(errors="replace")
            if in_time and process.returncode == 0:
                found = json.loads(said.splitlines()[-1])
                refused, applied = refused + found["refused"], applied + found["applied"]
                seconds += found["seconds"]
                continue
            number = int((folder / f"{first}.case").read_bytes() or b"-1")
            how = "ran out of time" if not in_time else f"ended with {process.returncode}"
            if in_time and process.returncode < 0:
                how = f"was ended by {signal.Signals(-process.returncode).name}"
            again = f"python -m fuzz.delta_cases {kind} {seed} {number} {number + 1}"
            failures.append(f"case {number} {how}; to see it again: {again}\n{said[-4000:]}")
    return Outcome(kind, cases, refused, applied, seconds, failures)


def _start(kind: str, seed: int, first: int, last: int, folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    numbers = [str(number) for number in (seed, first, last)]
    command = [sys.executable, "-m", "fuzz.delta_cases", kind, *numbers, "--progress", str(folder / f"{first}.case")]
    (folder / f"{first}.case").touch()
    with open(folder / f"{first}.out", "wb") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)


def _wait(running: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> list[bool]:
    """Returns which of them have ended before the deadline."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(_POLL_S)
    return [process.poll() is not None for process in running]
