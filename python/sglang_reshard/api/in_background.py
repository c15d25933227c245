"""Gives senders background updates; the modules for these are imported on first use."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_reshard.extras.asynchronous.background import BackgroundUpdates


class InBackground:
    """A sender that can update while the trainer computes its next step."""

    @cached_property
    def background(self) -> BackgroundUpdates[Any]:
        """Runs updates and snapshots during the trainer's next step, one at a time."""
        from sglang_reshard.extras.asynchronous.background import BackgroundUpdates

        return BackgroundUpdates()

    @property
    def _has_background(self) -> bool:
        """Returns whether anything was ever run in the background."""
        return "background" in vars(self)
