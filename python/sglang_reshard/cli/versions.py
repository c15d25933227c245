"""The versions that a report of a problem needs."""

from __future__ import annotations

import importlib.metadata

from sglang_reshard.version import PROTOCOL, __version__


def versions() -> str:
    """Returns a line for this package, its protocol, torch and SGLang."""
    lines = [f"sglang-reshard {__version__}", f"protocol {PROTOCOL}"]
    for package in ("torch", "sglang"):
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)
