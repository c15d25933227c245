"""Packages that the battery needs beside torch and Triton, where a bundle brought them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAMES = ("msgspec", "psutil")
FOLDER = Path(__file__).parents[2] / "build" / "gpu-packages"


def find() -> None:
    """Makes them importable from the bundle, if this Python has none of its own."""
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    elif missing:
        raise SystemExit(
            f"{' and '.join(missing)} cannot be imported; install them, or bring a bundle (make gpu-bundle)"
        )
