"""A program carried out in one process, with the whole checkpoint at hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_reshard.trace import Program


def replay(program: Program, weights: Mapping[str, torch.Tensor]) -> None:
    """Make every copy out of full checkpoint tensors, then the steps."""
    with torch.no_grad():
        for copy in program.copies:
            landing = copy.landing(program.targets[copy.target])
            landing.copy_(weights[copy.source][copy.region.slices()])
    program.finish()
