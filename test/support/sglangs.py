"""The two ends of the range of SGLang's versions: the one that is installed, and the newest, beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from sglang_reshard.testing import cpu_host

NEWEST = Path(sys.prefix) / "newest"
ENDS = ["pinned", "newest"]


@contextmanager
def chosen(end: str) -> Iterator[None]:
    """Processes that are started inside import that end's SGLang."""
    path = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        if end == "newest":
            if "+reshard." in metadata.version("sglang"):
                pytest.skip("a forked wheel is one version of SGLang, and what is tried with others is the plugin")
            assert (NEWEST / "sglang").is_dir(), f"there is no SGLang in {NEWEST}; run `make setup-newest`"
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(NEWEST), path])))
        yield


def environment(end: str) -> dict[str, str]:
    """Of a process that imports that end's SGLang on a host without a GPU."""
    with chosen(end):
        return {**os.environ, **cpu_host.environment(1)}
