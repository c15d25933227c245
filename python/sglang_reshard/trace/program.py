"""The result of a trace: what an engine rank's loader does with a checkpoint, as data.

A plan moves the copies; the steps are local to the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.names import matches_any
from sglang_reshard.layout.regions import ITEM_BYTES, Box, Region, TensorSpec
from sglang_reshard.trace.geometry import contiguous_strides

_BITS = {torch.uint16, torch.uint32, torch.uint64}  # torch computes little with them: they are packed data, mostly


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Returns the dtype of a checkpoint tensor. Raises Unsupported for one that cannot be transferred."""
    dtype = getattr(torch, spec.dtype, None) if spec.dtype in ITEM_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(
            f"{spec.name} has the dtype {spec.dtype}, which cannot be transferred. Send it as one of: "
            f"{', '.join(sorted(ITEM_BYTES))}."
        )
    return dtype


@cache
def is_lossless(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Returns True if every value of `narrow` is a value of `wide`."""
    if narrow == wide:
        return True
    if narrow.is_floating_point and wide.is_floating_point:
        a, b = torch.finfo(narrow), torch.finfo(wide)
        # float8_e8m0fnu has powers of two only: no other dtype fits into it.
        if wide == getattr(torch, "float8_e8m0fnu", None):
            return False
        return b.eps <= a.eps and b.max >= a.max and b.tiny * b.eps <= a.tiny * a.eps
    if torch.bool in (narrow, wide) or narrow.is_floating_point or wide.is_floating_point:
        return False
    i, j = torch.iinfo(narrow), torch.iinfo(wide)
    return j.min <= i.min and i.max <= j.max


def equals_one_cast(dtypes: Sequence[torch.dtype]) -> bool:
    """Returns True if casting through all of these dtypes equals casting from the first to the last."""
    steps = [d for i, d in enumerate(dtypes) if i == 0 or d != dtypes[i - 1]]
    return all(is_lossless(steps[0], d) for d in steps[1:-1])


def check_cast(source: str, have: torch.dtype, target: str, want: torch.dtype) -> None:
    """Raises Unsupported for a cast that torch makes but that does not preserve what the values mean."""
    if have == want:
        return
    if have.is_floating_point != want.is_floating_point or {have, want} & _BITS:
        raise Unsupported(
            f"{source} is {have}, but the engine's {target} is {want}, and a cast would not preserve the values. Send "
            "the tensor in the engine's format."
        )
    if want.is_floating_point and want.itemsize == 1:
        raise Unsupported(
            f"{source} is {have}, but the engine's {target} is {want}: a plain cast is no quantization. Send the "
            "quantized tensor and its scale, or start the engine unquantized."
        )


@dataclass(frozen=True, slots=True)
class MayStay:
    """Says what may stay as it is, by fnmatch patterns.

    frozen  of names in the engine's model, whose parameters may stay as a whole, and of names in its own checkpoint:
            what a start fills from these tensors may stay, also where it is a part of a fused parameter
    only    of names in the engine's model; all other parameters may stay. Empty if there is no such rule
    """

    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __call__(self, name: str) -> bool:
        if matches_any(name, self.frozen):
            return True
        return bool(self.only) and not matches_any(name, self.only)


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
    run: Callable[[], object] = field(compare=False, repr=False)


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
    arrivals  conversions of weights after all copies to that target, and before the steps. The target is a meta tensor
              until a transport has placed it in memory, see `landings.converting`
    left_alone  names of the parameters that it does not write completely; neither does a start on the checkpoint
    kept        names of tensors that it does not write, in order, see `trace.kept`
    """

    copies: tuple[Copy, ...]
    targets: dict[str, torch.Tensor]
    steps: tuple[Step, ...] = ()
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
