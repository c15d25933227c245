"""Warns where weights are sent over NCCL while the process uses NCCL itself.

Each NCCL kernel waits for those of its peers, and every call that waits for the whole GPU waits with it: an allocation,
the first launch of a kernel. A collective of the process that comes behind that is not launched, and a peer may wait
for it that we wait for (NVIDIA/nccl#1766). Fewer thread blocks do not help. Nothing here can prevent it, and so the
deadline ends it: no wait of ours keeps the interpreter's lock, and an abort ends our kernels, after which the others go
on.
"""

from __future__ import annotations

from functools import cache

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.routes.wire.ctas import CTAS

logger = get_logger(__name__)


def warn_of_concurrent_use(what: str) -> None:
    """Warns once in a process, if it has NCCL communicators of this package's.

    what  uses NCCL at the same time, as a clause: "the engine generates"
    """
    if CTAS.in_use():
        _warn(what)


@cache
def _warn(what: str) -> None:
    logger.warning(
        "weights are sent over NCCL while %s, which may use NCCL, too. If the two wait for each other, the update "
        "fails at its deadline. If that happens, use transport='ipc' or 'nixl', or update while nothing else runs",
        what,
    )
