"""The SGLang that processes of tests import: the installed one, the newest beside it, or that of any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.testing import cpu_host

NEWEST = Path(sys.prefix) / "newest"
ENDS = ["pinned", "newest"]
LOOK = Path(__file__).parents[1] / "engine" / "hooks_look.py"


@contextmanager
def importing(folder: Path) -> Iterator[None]:
    """Processes that are started inside find the packages of this folder first."""
    path = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), path])))
        yield


@contextmanager
def chosen(end: str) -> Iterator[None]:
    """Processes that are started inside import that end's SGLang."""
    if end != "newest":
        yield
        return
    if "+reshard." in metadata.version("sglang"):
        pytest.skip("a forked wheel is one version of SGLang, and what is tried with others is the plugin")
    assert (NEWEST / "sglang").is_dir(), f"there is no SGLang in {NEWEST}; run `make setup-newest`"
    with importing(NEWEST):
        yield


def environment(end: str) -> dict[str, str]:
    """Of a process that imports that end's SGLang on a host without a GPU."""
    with chosen(end):
        return _on_cpu()


def _on_cpu() -> dict[str, str]:
    return {**os.environ, **cpu_host.environment(1)}


def hooks_seen() -> dict[str, Any]:
    """What hooks_look.py finds in the SGLang that a process started here imports, and as "log" its standard error."""
    run = subprocess.run(
        [sys.executable, str(LOOK)],
        env=_on_cpu(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("seen: ")]
    assert run.returncode == 0, run.stderr[-6000:]
    return {"log": run.stderr, **json.loads(lines[0].removeprefix("seen: "))}
