"""Runs a traced program in one process, on the full checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_reshard.trace.program import Program


def replay(program: Program, weights: Mapping[str, torch.Tensor]) -> None:
    """Makes every copy of `program` from full checkpoint tensors, then runs its steps."""
    with torch.no_grad():
        for copy in program.copies:
            destination = copy.destination(program.targets[copy.target])
            destination.copy_(weights[copy.source][copy.region.slices()])
    program.run_steps()
