"""From a box of a checkpoint tensor to the live parameters: the views that copies run between."""

from __future__ import annotations

import torch

from sglang_reshard.layout.regions import Box
from sglang_reshard.plan import TensorIndex
from sglang_reshard.trace.program import Copy, Program
from sglang_reshard.transports.base import TransportContext


class CopyList:
    """Pairs of views, copied in one call. Casts where dtypes differ."""

    def __init__(self) -> None:
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._to.append(to)
        self._from.append(source)

    def run(self) -> None:
        if self._to:
            with torch.inference_mode():  # a quarter quicker than no_grad, for thousands of small boxes
                torch._foreach_copy_(self._to, self._from)


def destination_view(here: TransportContext, row: int) -> torch.Tensor:
    """Where a row of this rank's intake lands: a view of live memory."""
    copy, part, _ = here.intake.row(row)
    return here.program.targets[copy.target].as_strided(part.shard.count, copy.strides, copy.offset + part.offset)


class DestinationViews:
    """Where the boxes of checkpoint tensors go on this engine rank."""

    def __init__(self, catalog: TensorIndex, program: Program) -> None:
        self._catalog, self._targets = catalog, program.targets
        self._copies: dict[str, list[Copy]] = {}
        for copy in program.copies:
            self._copies.setdefault(copy.source, []).append(copy)

    def add(self, to: CopyList, tensor: int, box: Box, data: torch.Tensor) -> None:
        """Append the copies that take what this rank needs of `box` of a tensor from `data`, which is just that box."""
        name = self._catalog.layout.tensors[tensor].name
        for copy in self._copies.get(name, ()):
            part = copy.within(box)
            if part is not None:
                to.add(part.landing(self._targets[part.target]), data[part.region.slices(box.start)])
