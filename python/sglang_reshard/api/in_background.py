"""Gives senders their background: most have none, and import nothing of it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_reshard.extras.asynchronous.background import BackgroundUpdates


class InBackground:
    """A sender that can update behind the trainer's next step."""

    @cached_property
    def background(self) -> BackgroundUpdates[Any]:
        """Runs updates and snapshots behind the trainer's next step, one at a time."""
        from sglang_reshard.extras.asynchronous.background import BackgroundUpdates

        return BackgroundUpdates()

    @property
    def _has_background(self) -> bool:
        """Returns whether anything was ever run in the background."""
        return "background" in vars(self)
