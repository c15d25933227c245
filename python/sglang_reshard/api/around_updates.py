"""Adds a background and a probe to the updates of senders. The modules for these are imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_reshard.extras.asynchronous.background import BackgroundUpdates
    from sglang_reshard.extras.probe.probe import Probe
    from sglang_reshard.observability.report import UpdateReport
    from sglang_reshard.trainer.coordinator import Send
    from sglang_reshard.trainer.update_sender import UpdateSender

Update = Callable[[Any], dict[str, "UpdateReport"]]


class InBackground:
    """A sender that can update while the trainer computes its next step."""

    @cached_property
    def background(self) -> BackgroundUpdates[Any]:
        """Runs updates and snapshots during the trainer's next step, one at a time."""
        from sglang_reshard.extras.asynchronous.background import BackgroundUpdates

        return BackgroundUpdates()

    def _release_background(self) -> None:
        """Drops the copy of `update_async`, once that has ended."""
        if "background" in vars(self):
            self.background.release()


def probed(
    probe: Probe | None, sender: UpdateSender, engines: Mapping[str, Send | None], weights: Any, update: Update
) -> tuple[Any, Update]:
    """Returns the weights to send, and a function that updates engines to them and then probes these engines.

    The trainer's log-probabilities are computed here, of the weights as they are now. Collective.

    engines  name -> function that sends requests to the engine, on trainer rank 0; None on the others
    update   updates the engines to the weights, and returns a report of each
    """
    if probe is None:
        return weights, update
    from sglang_reshard.extras.probe.probing import Probing

    probing = Probing(probe, sender, engines)
    return probing.begin(weights), lambda given: probing.finish(update(given))
