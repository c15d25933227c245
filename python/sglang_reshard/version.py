"""Defines the version of this package, and the protocol number, which must be the same on both sides of an update."""

from __future__ import annotations

from sglang_reshard.errors import Mismatch

__version__ = "0.2.0.dev0"
# Releases with the same number update each other. Raise it when a message changes: `test_protocol_number` says when.
PROTOCOL = 1
VERSION_KEY = "reshard_version"  # in the internal state that SGLang's schedulers report


def check_same_protocol(protocol: int, version: str, *, theirs: str, ours: str) -> None:
    """Raises Mismatch unless the other side has the protocol of this process.

    protocol, version  of the other side; releases before protocol 1 send none, which is 0
    theirs, ours       what an error calls the sides: "the trainer", "the engine"
    """
    if protocol == PROTOCOL:
        return
    older = theirs if protocol < PROTOCOL else ours
    raise Mismatch(
        f"{theirs} has protocol {protocol} (sglang-reshard {version or 'unknown'}), {ours} has protocol {PROTOCOL} "
        f"(sglang-reshard {__version__}); install the same version on both, or one with the same protocol: "
        f"{older} has the older one"
    )
