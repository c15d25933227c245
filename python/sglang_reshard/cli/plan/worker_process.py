"""Runs a function in a new process that reports while it works: for choices that must precede SGLang's import.

for value in run("package.module", "serve", job, ...): ...     # in this process
job = read_job(); report(...); report(...)                     # in the worker, inside serve()
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
from typing import Any

from sglang_reshard.cli.plan.forked_jobs import ChildFailed
from sglang_reshard.errors import DeadlineExceeded

_MARK = "sglang-reshard answer: "
_GRACE_SECONDS = 120
TOO_LATE = 3


def run(
    module: str, function: str, job: Any, *, what: str, environment: Mapping[str, str], deadline_seconds: float
) -> Iterator[Any]:
    """Yields what `function` of `module` reports for `job`, both as JSON. The process and its forks end with this.

    what              names the work in error messages
    deadline_seconds  for the work after the imports, which the worker enforces itself

    Raises ChildFailed with the worker's stderr, and DeadlineExceeded when it exits with `TOO_LATE`.
    """
    # Files rather than pipes for stdin and stderr, so that neither side can block the other.
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as job_file:
        json.dump(job, job_file)
        job_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import {function}; {function}()"],
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
        if code == TOO_LATE:
            raise DeadlineExceeded(f"{what}: {errors.read()[-500:]}")
        if code:
            raise ChildFailed(f"{what} failed:\n{errors.read()[-8000:]}")


# ---- in the worker process


def read_job() -> Any:
    """Returns the job that `run` was given."""
    return json.load(sys.stdin)


def report(value: Any) -> None:
    """Yields `value` from `run` in the parent process."""
    print(_MARK + json.dumps(value), flush=True)
