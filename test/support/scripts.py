"""Scripts beside the tests, run in processes of their own: SGLang chooses its code paths at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TEST = Path(__file__).parent.parent


def run_script(script: Path, *arguments: str, timeout_s: float) -> list[str]:
    """The lines that a script printed. Its errors fail the test."""
    run = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TEST), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    return run.stdout.splitlines()
