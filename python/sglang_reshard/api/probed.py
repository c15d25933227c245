"""Adds the probe to a sender's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_reshard.extras.probe.probe import Probe
    from sglang_reshard.observability.report import UpdateReport
    from sglang_reshard.trainer.coordinator import Send
    from sglang_reshard.trainer.update_sender import UpdateSender

Update = Callable[[Any], dict[str, "UpdateReport"]]


def probed(
    probe: Probe, sender: UpdateSender, engines: Mapping[str, Send | None], weights: Any, update: Update
) -> tuple[Any, Update]:
    """Returns the weights to send, and a function that updates engines to them and then probes these engines.

    The trainer's log-probabilities are computed here, of the weights as they are now. Collective.

    engines  name -> function that sends requests to the engine, on trainer rank 0; None on the others
    update   updates the engines to the weights, and returns a report of each
    """
    from sglang_reshard.extras.probe.probing import Probing  # of no use to an update without a probe

    probing = Probing(probe, sender, engines)
    return probing.begin(weights), lambda given: probing.finish(update(given))
