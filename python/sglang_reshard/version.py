"""Defines the version of this package, which must be the same on both sides of an update."""

from __future__ import annotations

from sglang_reshard.errors import Mismatch

__version__ = "0.2.0.dev0"
VERSION_KEY = "reshard_version"  # in the internal state that SGLang's schedulers report


def check_same_version(trainer_version: str) -> None:
    """Raises Mismatch unless the trainer has the version of this process, an engine rank's."""
    if trainer_version != __version__:
        raise Mismatch(
            f"the trainer has sglang-reshard {trainer_version}, but the engine has {__version__}; install the same "
            "version on both"
        )
