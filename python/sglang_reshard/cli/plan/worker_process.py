"""Work in a fresh process, which answers while it works: for what must be chosen before SGLang is imported.

for answer in answers("package.module", "serve", job, ...): ...     # here
job = given(); answer(...); answer(...)                             # there, in serve()
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


def answers(
    module: str, function: str, job: Any, *, what: str, environment: Mapping[str, str], deadline_seconds: float
) -> Iterator[Any]:
    """What `function` of `module` answers to `job`, both ways as JSON. The process and its forks end with this.

    what  names the work in errors

    Raises ChildFailed with what the process wrote to stderr, DeadlineExceeded when it ends with `TOO_LATE`. It has
    `deadline_seconds` for what it does after its imports, and keeps them itself.
    """
    # Files, not pipes, for what goes in and for errors: neither side can then block the other.
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as order:
        json.dump(job, order)
        order.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import {function}; {function}()"],
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None

        def end() -> None:
            # With the children that it forked, which are of its session.
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


# ---- in the fresh process


def given() -> Any:
    """The job."""
    return json.load(sys.stdin)


def answer(value: Any) -> None:
    print(_MARK + json.dumps(value), flush=True)
