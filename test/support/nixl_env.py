"""NIXL in an environment of its own, beside the project's: `make setup-nixl`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".venv" / "nixl"
needs_nixl = pytest.mark.skipif(
    not FOLDER.exists() or Path(sys.prefix) != FOLDER.parent,  # it is compiled for that environment's Python
    reason="NIXL is not installed: make setup-nixl",
)


def use_nixl(ways: str = "") -> None:
    """Makes NIXL importable in this process, and in those that it starts by fork. `ways`: UCX_TLS, all by default."""
    if ways:
        os.environ["UCX_TLS"] = ways
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
