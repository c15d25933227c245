"""The version of this package; both sides of an update must have the same."""

from __future__ import annotations

from sglang_reshard.errors import Mismatch

__version__ = "0.1.0"
VERSION_KEY = "reshard_version"  # under which SGLang's schedulers tell theirs


def check_same_version(trainers: str) -> None:
    """On the engine's side: raise Mismatch unless the trainer has the version that this process has."""
    if trainers != __version__:
        raise Mismatch(
            f"the trainer has sglang-reshard {trainers}, the engine {__version__}; install the same version on both"
        )
