"""Block-fp8 engines of 16 and 32 bit trainers: weights are quantized where they have arrived.

An engine with `weight_block_size` keeps a weight as float8_e4m3fn, with a float32 scale for each block. A trainer sends
it under the same name without a scale. The loader is then traced with the two tensors that a checkpoint in block-fp8
would have; what it does with them is done with those that a rank computes by itself, out of whole blocks of the
trainer's weight, in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box, Region, TensorSpec
from sglang_reshard.trace.casts import torch_dtype
from sglang_reshard.trace.lazy_storage import CheckpointTensor, VersionedView, leaves
from sglang_reshard.trace.memory import Record
from sglang_reshard.trace.program import Copy, Program, Step

FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(FP8).max
_SCALE = "_scale_inv"
_CHUNK_ELEMENTS = 16 << 20  # that are in float32 at a time


def block_size(model: torch.nn.Module) -> tuple[int, int] | None:
    """Returns rows and columns that share a scale, as the quantization methods of SGLang's modules have it."""
    for module in model.modules():
        config = getattr(getattr(module, "quant_method", None), "quant_config", None)
        if found := getattr(config, "weight_block_size", None):
            rows, columns = found
            return int(rows), int(columns)
    return None


def wider(specs: Sequence[TensorSpec]) -> set[str]:
    """Returns the names of the checkpoint tensors that could be weights to quantize: those without a scale."""
    names = {spec.name for spec in specs}
    matrices = (spec for spec in specs if len(spec.shape) > 1 and spec.name + _SCALE not in names)
    return {spec.name for spec in matrices if torch_dtype(spec).is_floating_point and spec.item_bytes > 1}


def sources_of_fp8(records: Iterable[Record]) -> set[str]:
    """Returns the names of the checkpoint tensors that are written as float8_e4m3fn."""
    return {tensor.spec.name for record in records if record.dtype == FP8 for tensor in _tensors(record.content)}


def _tensors(content: object) -> Iterator[CheckpointTensor]:
    if isinstance(content, CheckpointTensor):
        yield content
    elif isinstance(content, VersionedView):
        yield from (leaf.storage.base for leaf in leaves(content) if isinstance(leaf.storage.base, CheckpointTensor))


def in_fp8(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype=str(FP8).removeprefix("torch."))


def as_quantized(specs: Iterable[TensorSpec], names: set[str], block: tuple[int, int]) -> list[TensorSpec]:
    """Returns what a checkpoint in block-fp8 has in place of `specs`, if `names` are quantized in it."""
    found = []
    for spec in specs:
        if spec.name not in names:
            found.append(spec)
            continue
        scales = tuple(-(-n // b) for n, b in zip(spec.shape[-2:], block, strict=True))
        found.append(in_fp8(spec))
        found.append(TensorSpec(spec.name + _SCALE, (*spec.shape[:-2], *scales), "float32"))
    return found


def quantize_blocks(weights: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float8_e4m3fn weights and float32 scales, [n, rows, columns] and [n, blocks of rows, of columns].

    weights  [n, rows, columns], floating-point. The last blocks of rows and columns may be smaller than `block`

    The arithmetic is that of verl's quantizer in torch (`verl.utils.kernel.fp8_kernel`), to the bit: a block's scale
    is the reciprocal of 448 divided by its largest absolute value, both in float32; 1 for a block of zeros.
    """
    n, rows, columns = weights.shape
    down, across = (-(-size // b) for size, b in zip((rows, columns), block, strict=True))
    padding = (0, across * block[1] - columns, 0, down * block[0] - rows)
    blocks = torch.nn.functional.pad(weights.float(), padding).view(n, down, block[0], across, block[1])
    largest = blocks.abs().amax(dim=(2, 4), keepdim=True)
    factors = torch.full_like(largest, _MAX).div_(largest)  # `_MAX / largest` multiplies by a reciprocal
    factors.masked_fill_((largest == 0) | (largest == torch.inf), 1.0)
    scaled = (blocks * factors).clamp_(-_MAX, _MAX).to(FP8)
    quantized = scaled.view(n, down * block[0], across * block[1])[:, :rows, :columns]
    return quantized, factors.reciprocal().view(n, down, across)


class _Slot(NamedTuple):
    """Whole blocks of a checkpoint tensor, kept from `first` on in a `_Scratch`."""

    box: Box
    scratch: _Scratch
    first: int


@dataclass(eq=False, slots=True)
class _Scratch:
    """Memory for the blocks of all tensors of which a rank needs `rows` x `columns`.

    weights    bfloat16 [n, rows, columns], as copies bring it
    quantized  the same weights afterwards, in the first half of the same memory
    scales     float32 [n, blocks of rows, blocks of columns]
    copies     destinations and values, of integers and of scales
    """

    rows: int
    columns: int
    block: tuple[int, int]
    count: int = 0
    weights: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    quantized: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    scales: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    copies: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...] = field(
        default_factory=lambda: (([], []), ([], []))
    )

    @property
    def name(self) -> str:
        return f"scratch/{self.rows}x{self.columns} in bfloat16"

    def allocate(self, device: torch.device) -> None:
        shape = self.count, self.rows, self.columns
        self.weights = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.quantized = self.weights.view(-1).view(FP8)[: self.weights.numel()].view(shape)
        scales = tuple(-(-n // b) for n, b in zip(shape[1:], self.block, strict=True))
        self.scales = torch.empty((self.count, *scales), dtype=torch.float32, device=device)

    def add_copy(self, destination: torch.Tensor, value: torch.Tensor) -> None:
        if value.dtype == FP8:  # copied as what every device copies
            destination, value = destination.view(torch.uint8), value.view(torch.uint8)
        destinations, values = self.copies[value.dtype == torch.float32]
        destinations.append(destination)
        values.append(value)

    def run(self) -> None:
        step = max(1, _CHUNK_ELEMENTS // (self.rows * self.columns))
        for first in range(0, self.count, step):
            chunk = slice(first, first + step)
            # Writes half as much of the memory as has been read until now.
            quantized, self.scales[chunk] = quantize_blocks(self.weights[chunk], self.block)
            self.quantized[chunk].copy_(quantized)
        for destinations, values in self.copies:
            if destinations:
                torch._foreach_copy_(destinations, values)


def quantize_on_arrival(
    program: Program, specs: Mapping[str, TensorSpec], names: set[str], block: tuple[int, int], device: torch.device
) -> Program:
    """Returns a program that takes the tensors `names` as `specs` has them, and quantizes them before its other steps.

    program  of a loader that was given `as_quantized` specs
    """
    quantized = {name: (name, False) for name in names} | {name + _SCALE: (name, True) for name in names}
    of_tensor: dict[str, list[Copy]] = {}
    for copy in program.copies:
        if copy.source in quantized:
            of_tensor.setdefault(quantized[copy.source][0], []).append(copy)
    scratch: dict[tuple[int, int], _Scratch] = {}
    slots: dict[str, list[_Slot]] = {}
    copies = [copy for copy in program.copies if copy.source not in quantized]
    for name, those in of_tensor.items():
        boxes = (_blocks(copy.region, specs[name].shape, block, quantized[copy.source][1]) for copy in those)
        for box in _covering(boxes):
            *stacked, rows, columns = box.shape
            group = scratch.setdefault((rows, columns), _Scratch(rows, columns, block))
            slots.setdefault(name, []).append(_Slot(box, group, group.count))
            strides = tuple(math.prod(box.shape[d + 1 :]) for d in range(len(box.shape)))
            copies.append(Copy(name, Region.of(box), group.name, group.count * rows * columns, strides))
            group.count += math.prod(stacked)
    for group in scratch.values():
        group.allocate(device)
    for copy in (copy for those in of_tensor.values() for copy in those):
        name, is_scale = quantized[copy.source]
        needed = _blocks(copy.region, specs[name].shape, block, is_scale)
        slot = next(slot for slot in slots[name] if slot.box.intersect(needed) == needed)
        destination, value = copy.destination(program.targets[copy.target]), _value(slot, copy.region, is_scale)
        if destination.dtype != value.dtype:
            raise Unsupported(
                f"{copy.source} is {value.dtype} where {name} is quantized, and {destination.dtype} in {copy.target}: "
                "the engine keeps it in two ways. Send it quantized, with its scale, or start the engine unquantized."
            )
        slot.scratch.add_copy(destination, value)
    targets = program.targets | {group.name: group.weights.view(-1) for group in scratch.values()}
    steps = [Step(group.name, f"from {group.count} weights in bfloat16", group.run) for group in scratch.values()]
    return replace(program, copies=tuple(copies), targets=targets, steps=(*steps, *program.steps))


def _value(slot: _Slot, region: Region, is_scale: bool) -> torch.Tensor:
    """Returns the part of a slot's weights, or scales, that a region of the tensor of weights, or scales, has."""
    shape, origin, whole = slot.box.shape, slot.box.start, slot.scratch.quantized
    if is_scale:
        whole = slot.scratch.scales
        origin = (*origin[:-2], *(a // b for a, b in zip(origin[-2:], slot.scratch.block, strict=True)))
    stacked = shape[:-2]
    own = whole[slot.first : slot.first + math.prod(stacked)]
    return own.view(*stacked, *whole.shape[1:])[region.slices(origin)]


def _blocks(region: Region, shape: tuple[int, ...], block: tuple[int, int], is_scale: bool) -> Box:
    """Returns the whole blocks of a weight of `shape` that a region of it, or of its scales, lies in."""
    stop = tuple(a + (n - 1) * step + 1 for a, n, step in zip(region.start, region.count, region.step, strict=True))
    unit = (1, 1) if is_scale else block
    first = tuple(a // u * b for a, u, b in zip(region.start[-2:], unit, block, strict=True))
    last = tuple(-(-z // u) * b for z, u, b in zip(stop[-2:], unit, block, strict=True))
    end = tuple(map(min, last, shape[-2:]))
    return Box((*region.start[:-2], *first), (*stop[:-2], *end))


def _covering(boxes: Iterable[Box]) -> list[Box]:
    """Returns the boxes that no other one contains, in order."""
    kept: list[Box] = []
    for box in sorted(set(boxes), key=lambda box: -box.numel):
        if not any(other.intersect(box) == box for other in kept):
            kept.append(box)
    return sorted(kept)
