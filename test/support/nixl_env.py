"""NIXL in an environment of its own, beside the project's: `make setup-nixl`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".venv" / "nixl"
needs_nixl = pytest.mark.skipif(not FOLDER.exists(), reason="NIXL is not installed: make setup-nixl")


def use_nixl() -> None:
    """Makes NIXL importable in this process, and in those that it starts by fork."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
