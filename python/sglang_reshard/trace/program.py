"""What an engine rank's loader does with a checkpoint, as data.

A Program says where every element of every live tensor of one engine rank comes from. It is
made once by `trace()`; the copies are what a plan moves, the rest is local to the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from sglang_reshard.layout.regions import Box, Region, TensorSpec


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `region` of checkpoint tensor `source` land in the storage `target`.

    The element at multi-index i (counted in steps of the region) lands at element
    `offset + sum(i[d] * strides[d])` of the target's storage, cast to its dtype.
    """

    source: str
    region: Region
    target: str
    offset: int
    strides: tuple[int, ...]

    def within(self, box: Box) -> Copy | None:
        """The part of it whose elements lie in `box` of the checkpoint tensor; None if there are none."""
        common = self.region.intersect(box)
        if common is None:
            return None
        region, skipped = common
        offset = self.offset + sum(n * s for n, s in zip(skipped, self.strides, strict=True))
        return replace(self, region=region, offset=offset)

    def landing(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of the target's flat storage tensor that the region lands in."""
        return flat.as_strided(self.region.count, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Step:
    """Local work after all copies have landed: a fill, or an expression over live and scratch tensors."""

    target: str
    what: str
    run: Callable[[], None] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Program:
    """One engine rank's loader.

    sources  the checkpoint tensors it was traced with, in order
    copies   checkpoint elements -> storages, each element of a parameter exactly once
    targets  storage name -> flat 1-D tensor over the whole live storage (or scratch, named "scratch/N")
    steps    fills, expressions and held-back post_load_weights calls, in the loader's order
    seconds  how long the trace took
    unused   checkpoint tensors of which this rank needs nothing: other ranks' experts, a tied lm_head
    """

    sources: tuple[TensorSpec, ...]
    copies: tuple[Copy, ...]
    targets: dict[str, torch.Tensor]
    steps: tuple[Step, ...]
    seconds: float
    unused: tuple[str, ...] = ()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the tensors that exist only to hold operands of expressions."""
        return sum(t.numel() * t.element_size() for n, t in self.targets.items() if n.startswith("scratch/"))

    def finish(self) -> None:
        """Run the local steps. To be called once all copies of an update have landed."""
        with torch.no_grad():
            for step in self.steps:
                step.run()
