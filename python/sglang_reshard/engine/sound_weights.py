"""Tracks which parameters of one engine rank hold weights that something has brought.

An engine that starts on random values (`load_format="dummy"`), or whose weights were released, has none. An update
that leaves parameters as they are must not call them complete then.
"""

from __future__ import annotations

from collections.abc import Collection

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq

_SHOWN_NAMES = 3


class SoundWeights:
    """One engine rank's. Nobody else's updates are known here: a request tells when all weights came or went."""

    def __init__(self) -> None:
        self._changes = 0  # as of the last request
        self._sound: frozenset[str] | None = None  # names in the engine's model; None for all

    def check(self, kept: Collection[str], request: DistributedUpdateWeightsReq, engine_rank: int) -> None:
        """Raises Mismatch if an update would keep a parameter that nothing has brought."""
        if request.stock_changes != self._changes:
            self._changes = request.stock_changes
            self._sound = None if request.stock_loaded else frozenset()
        if self._sound is None or not (unsound := sorted(set(kept) - self._sound)):
            return
        more = f" and {len(unsound) - _SHOWN_NAMES} more" if len(unsound) > _SHOWN_NAMES else ""
        raise Mismatch(
            f"engine rank {engine_rank}: {', '.join(unsound[:_SHOWN_NAMES])}{more} would stay as they are, and nothing "
            "has brought them: the engine was started with load_format='dummy', its weights were released, or an "
            "update of them broke off. Send them once, without frozen= and only=, or start the engine on a checkpoint"
        )

    def begin(self, kept: Collection[str]) -> None:
        """Must be called before an update writes: all but what it keeps is unsound until it has succeeded."""
        self._sound = frozenset(kept)

    def succeed(self) -> None:
        """Must be called when an update has succeeded: all is sound, as what it has kept was."""
        self._sound = None
