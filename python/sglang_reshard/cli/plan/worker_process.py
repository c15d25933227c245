"""Runs a function in a new process that reports while it works: for choices that must precede SGLang's import.

`run_in_forks` runs jobs in forks of such a process: slow imports happen once, and each fork has its own globals.

for value in run("package.module", "work", job, ...): ...     # in this process
report(...); report(...)                                      # in the worker, inside work(job)
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from sglang_reshard.errors import DeadlineExceeded, Mismatch, ReshardError, Unsupported

_MARK = "sglang-reshard answer: "
_GRACE_SECONDS = 120
_TOO_LATE, _IMPOSSIBLE = 3, 4
Job = TypeVar("Job")


def run(
    module: str, function: str, job: Any, *, what: str, environment: Mapping[str, str], deadline_seconds: float
) -> Iterator[Any]:
    """Yields what `function` of `module`, called with `job`, reports. Both are JSON. Process and forks end with this.

    what              names the work in error messages
    deadline_seconds  for the work after the imports, which the worker enforces itself

    Raises DeadlineExceeded and Mismatch if the function raises these, or Unsupported, and ChildFailed with the worker's
    stderr for any other error.
    """
    # Files rather than pipes for stdin and stderr, so that neither side can block the other.
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as job_file:
        json.dump(job, job_file)
        job_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import work; work({module!r}, {function!r})"],
            stdin=job_file,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None

        def end() -> None:
            # Its forked children are in its session and end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        watch = threading.Timer(deadline_seconds + _GRACE_SECONDS, end)
        watch.start()
        try:
            for line in process.stdout:
                # SGLang prints to stdout as well.
                if line.startswith(_MARK):
                    yield json.loads(line.removeprefix(_MARK))
            code = process.wait()
        finally:
            watch.cancel()
            end()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        said = errors.read()
        if code in (_TOO_LATE, _IMPOSSIBLE):
            why = said.rpartition(_MARK)[2].strip()
            raise DeadlineExceeded(f"{what}: {why}") if code == _TOO_LATE else Mismatch(why)
        if code:
            raise ChildFailed(f"{what} failed:\n{said[-8000:]}")


# ---- in the worker process


def work(module: str, function: str) -> None:
    """Calls the function with the job that `run` was given, and exits."""
    try:
        getattr(import_module(module), function)(json.load(sys.stdin))
    except (DeadlineExceeded, Mismatch, Unsupported) as error:
        print(f"{_MARK}{error}", file=sys.stderr)
        sys.exit(_TOO_LATE if isinstance(error, DeadlineExceeded) else _IMPOSSIBLE)


def report(value: Any) -> None:
    """Yields `value` from `run` in the parent process."""
    print(_MARK + json.dumps(value), flush=True)


# ---- in forks


class ChildFailed(ReshardError):
    """A forked child raised; the message has its traceback."""


def run_in_forks(
    work: Callable[[Job], Any], jobs: Sequence[Job], *, processes: int, deadline_seconds: float
) -> Iterator[tuple[Job, Any]]:
    """Yields each job with the result of `work(job)`, run in a separate child, in the order in which they end.

    At most `processes` children run at a time. All of them are gone when this returns or raises. Raises
    ChildFailed with the traceback of the first that failed, DeadlineExceeded when the jobs take longer.
    """
    deadline = time.monotonic() + deadline_seconds
    todo = list(jobs)
    running: dict[Connection, tuple[Job, BaseProcess]] = {}
    try:
        while todo or running:
            while todo and len(running) < processes:
                job = todo.pop(0)
                reader, child = _start(work, job)
                running[reader] = job, child
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(job) for job, _ in running.values())
                raise DeadlineExceeded(f"Not finished within {deadline_seconds:g} s: {late}.")
            for reader in [r for r in running if r in ready]:
                job, child = running.pop(reader)
                yield job, _result(job, reader, child)
    finally:
        for reader, (_, child) in running.items():
            child.kill()
            child.join()
            reader.close()


def _start(work: Callable[[Job], Any], job: Job) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def run() -> None:
        # A fork has none of its parent's OpenMP threads, and an operator that divides its work waits for them.
        torch.set_num_threads(1)
        try:
            writer.send((True, work(job)))
        except BaseException:
            writer.send((False, traceback.format_exc()))

    child = context.Process(target=run)
    child.start()
    writer.close()
    return reader, child


def _result(job: Any, reader: Connection, child: BaseProcess) -> Any:
    try:
        ok, value = reader.recv()
    except EOFError:
        child.join()
        raise ChildFailed(f"The child for {job} died with exit code {child.exitcode}.") from None
    finally:
        reader.close()
    child.join()
    if not ok:
        raise ChildFailed(f"The child for {job} failed:\n{value}")
    return value
