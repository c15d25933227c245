"""From a box of a checkpoint tensor to the live parameters: the views that copies run between."""

from __future__ import annotations

import torch

from sglang_reshard.layout import Box
from sglang_reshard.plan import Pieces, Round
from sglang_reshard.trace.program import Copy, Program


class CopyList:
    """Pairs of views, copied in one call. Casts where dtypes differ."""

    def __init__(self) -> None:
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._to.append(to)
        self._from.append(source)

    @property
    def source_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._from)

    def run(self) -> None:
        if self._to:
            with torch.no_grad():
                torch._foreach_copy_(self._to, self._from)


class Landings:
    """Where the boxes of checkpoint tensors go on this engine rank."""

    def __init__(self, pieces: Pieces, program: Program) -> None:
        self._pieces, self._targets = pieces, program.targets
        self._copies: dict[str, list[Copy]] = {}
        for copy in program.copies:
            self._copies.setdefault(copy.source, []).append(copy)

    def add(self, to: CopyList, piece: int, box: Box, data: torch.Tensor) -> None:
        """Append the copies that take what this rank needs of `box` from `data`, a tensor of just that box."""
        name = self._pieces.layout.tensors[self._pieces.tensor_of[piece]].name
        for copy in self._copies.get(name, ()):
            part = copy.within(box)
            if part is not None:
                to.add(part.landing(self._targets[part.target]), data[part.region.slices(box.start)])


def payload_bytes(pieces: Pieces, r: Round) -> int:
    """Bytes of a round without the padding between its segments."""
    return sum(s.box.numel * pieces.item_bytes(s.piece) for s in r.segments)
