"""Refuses every verl but the one that the hooks are written for.

verl's methods and configuration change from release to release, and a hook on a method that means something else fails
in the first sync, after minutes of start-up, or not at all. So the version is compared when verl imports this package.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from sglang_reshard.errors import Unsupported

SUPPORTED = Version("0.9.1")  # what test/verl runs; the extra `verl` of pyproject.toml


def check(version: str) -> None:
    """Raises Unsupported unless this is the supported release of verl, a post-release or a local build of it."""
    try:
        found = Version(version)
    except InvalidVersion:
        found = Version("0")
    if not found.is_prerelease and found.release == SUPPORTED.release:
        return
    age = "older" if Version("0") < found < SUPPORTED else "newer" if found > SUPPORTED else "another version"
    raise Unsupported(
        f"verl {version} cannot sync with sglang_reshard.verl: it is {age} than verl {SUPPORTED}, the only one that is "
        f"supported and tested. Install verl=={SUPPORTED}, or remove checkpoint_engine.custom_backend_module and "
        "checkpoint_engine.backend=reshard from verl's configuration, and verl syncs by its own means"
    )
