"""The result of a trace: what an engine rank's loader does with a checkpoint, as data.

A plan moves the copies; the steps are local to the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.trace.geometry import contiguous_strides


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `region` of checkpoint tensor `source` are copied to the storage `target`, cast to its dtype.

    The element at multi-index i, counted in steps of the region, is copied to element
    `offset + sum(i[d] * strides[d])` of the storage.
    """

    source: str
    region: Region
    target: str
    offset: int
    strides: tuple[int, ...]

    def within(self, box: Box) -> Copy | None:
        """Returns the part whose elements are in `box` of the checkpoint tensor; None if there are none."""
        common = self.region.intersect(box)
        if common is None:
            return None
        region, skipped = common
        offset = self.offset + sum(n * s for n, s in zip(skipped, self.strides, strict=True))
        return replace(self, region=region, offset=offset)

    def destination(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the view of the target's flat storage tensor that the region is copied to."""
        return flat.as_strided(self.region.count, self.strides, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Step:
    """Local work after all copies: a fill, an expression over live and scratch tensors, or a post_load_weights call.

    description  "fill VALUE", "from NAMES" (of the tensors that an expression depends on), "post_load_weights",
                 "unfold", see `folded`, or "use" of received tensors
    """

    target: str
    description: str
    run: Callable[[], None] = field(compare=False, repr=False)


class Arrival(Protocol):
    """Tensors that arrive for one target in another form than they are kept in, and are converted once complete."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it arrives in."""

    @property
    def unit(self) -> str | None:
        """Those of one unit are converted together, once all of them are complete. None: each by itself."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Those of one kind that are complete at the same time are given to one finisher."""

    @staticmethod
    def finisher(
        members: Sequence[Any], memory: torch.Tensor, targets: Mapping[str, torch.Tensor]
    ) -> Callable[[], None]:
        """Returns what converts `members`, one after the other in `memory` (bytes), and writes them to `targets`."""


@dataclass(frozen=True)
class Program:
    """One engine rank's loader.

    copies    checkpoint elements -> storages, each element of a parameter exactly once
    targets   storage name -> flat 1-D tensor over the whole live storage (or scratch, named "scratch/N")
    steps     fills, expressions and deferred post_load_weights calls, in the loader's order
    seconds   that the trace took
    arrivals  conversions of weights after all copies to that target, and before the steps. The target is a meta tensor
              until a transport has placed it in memory, see `landings.converting`
    left_alone  names of the parameters that it does not write completely; neither does a start on the checkpoint
    kept        names of tensors that it does not write, in order, see `trace.kept`
    """

    copies: tuple[Copy, ...]
    targets: dict[str, torch.Tensor]
    steps: tuple[Step, ...] = ()
    seconds: float = 0.0
    arrivals: Mapping[str, Arrival] = field(default_factory=dict)
    left_alone: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @classmethod
    def whole(
        cls, shapes: Mapping[str, tuple[int, ...]], targets: dict[str, torch.Tensor], steps: tuple[Step, ...] = ()
    ) -> Program:
        """Returns the copies of whole tensors, by name, into contiguous ones of the same shapes.

        targets  flat, and may have others in addition
        """
        regions = {name: Region.of(Box.whole(shape)) for name, shape in shapes.items()}
        copies = (
            Copy(name, region, name, 0, contiguous_strides(shapes[name]))
            for name, region in regions.items()
            if region.numel
        )
        return cls(tuple(copies), targets, steps)

    @cached_property  # every update reports it, and there are as many targets as parameters
    def scratch_bytes(self) -> int:
        """Bytes of the tensors that only hold operands of expressions."""
        return sum(t.numel() * t.element_size() for n, t in self.targets.items() if n.startswith("scratch/"))

    def run_steps(self) -> None:
        """Runs the local steps. Must be called after all copies of an update."""
        with torch.no_grad():
            for step in self.steps:
                step.run()
