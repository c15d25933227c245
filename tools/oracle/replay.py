"""Runs a traced program in one process, on the full checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_reshard.derived import DerivedState
from sglang_reshard.landings.base import Landing
from sglang_reshard.trace.program import Program


def replay(program: Program, weights: Mapping[str, torch.Tensor], derived: DerivedState | None = None) -> None:
    """Makes every copy of `program` from full checkpoint tensors, then runs its steps, and renews derived state."""
    landing = Landing(program).converting(torch.device("cpu"), 0)
    landing.place([program.arrivals], ())
    with torch.no_grad():
        for copy in program.copies:
            destination = copy.destination(landing.program.targets[copy.target])
            destination.copy_(weights[copy.source][copy.region.slices()])
    if program.arrivals:
        landing.arrived(0)
    program.run_steps()
    if derived is not None:
        derived.renew(model_ran=True)
