"""The versions that a report of a problem needs."""

from __future__ import annotations

import importlib.metadata

from sglang_reshard.version import PROTOCOL, __version__


def versions() -> str:
    """Returns a line for this package, its protocol, torch and SGLang."""
    own = [f"sglang-reshard {__version__}", f"protocol {PROTOCOL}"]
    return "\n".join(own + [_version(package) for package in ("torch", "sglang")])


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"
