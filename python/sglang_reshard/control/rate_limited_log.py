"""What a hub says of those it turned away."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_EVERY_S = 1.0


class RateLimitedLog:
    """Writes of each refusal to the log, at most one line a second: strangers must not fill a disk."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._unsaid = 0

    def log(self, peer: str, why: str) -> None:
        now = time.monotonic()
        if now - self._last < _EVERY_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} other refusals were not logged)" if self._unsaid else ""
        self._last, self._unsaid = now, 0
        logger.warning("refused a connection from %s: %s%s", peer, why, more)
