"""Runs a function in a new process that reports while it works: for choices that must precede SGLang's import.

for value in run("package.module", "work", job, ...): ...     # in this process
report(...); report(...)                                      # in the worker, inside work(job)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from sglang_reshard.cli.plan.forked_jobs import ChildFailed
from sglang_reshard.errors import DeadlineExceeded, Mismatch, Unsupported

_MARK = "sglang-reshard answer: "
_GRACE_SECONDS = 120
_TOO_LATE, _IMPOSSIBLE = 3, 4


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
