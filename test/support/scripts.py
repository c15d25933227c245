"""Scripts beside the tests, run in processes of their own: SGLang chooses its code paths at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEST = Path(__file__).parent.parent
_ANSWERS = "TEST_SCRIPT_ANSWERS"  # the file that answers go to


def run_script(
    script: Path,
    *arguments: str,
    timeout_s: float = 1500,
    environment: Mapping[str, str] | None = None,
    python: str | Path = sys.executable,
) -> list[str]:
    """The answers that a script gave, one after the other. Its errors fail the test."""
    path = os.pathsep.join([str(TEST), str(TEST.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.NamedTemporaryFile("r") as answers:
        run = subprocess.run(
            [python, str(script), *arguments],
            env={**os.environ, "PYTHONPATH": path, _ANSWERS: answers.name, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-8000:]
        return answers.read().splitlines()


def answers(script: Path, cases: Mapping[Any, Any], *arguments: str) -> dict[Any, Any]:
    """Returns what a script answered of each case, by the case's name. It gets `arguments`, and all cases as JSON."""
    found = map(json.loads, run_script(script, *arguments, json.dumps(list(cases.values()))))
    return dict(zip(cases, found, strict=True))


def answer(line: str) -> None:
    """Called by a script. Not by its output: SGLang and forked children print to that, too, in between."""
    if path := os.environ.get(_ANSWERS):
        with open(path, "a") as answers:
            answers.write(line + "\n")
    else:  # started by hand
        print(line, flush=True)
