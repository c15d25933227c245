"""The versions of installed packages, and those that a report of a problem needs."""

from __future__ import annotations

import importlib.metadata

from sglang_reshard.version import PROTOCOL, __version__


def versions() -> str:
    """Returns a line for this package, its protocol, torch and SGLang."""
    own = [f"sglang-reshard {__version__}", f"protocol {PROTOCOL}"]
    others = [f"{package} {installed_version(package) or 'is not installed'}" for package in ("torch", "sglang")]
    return "\n".join(own + others)


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
