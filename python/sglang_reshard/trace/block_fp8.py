"""Block-fp8 and NVFP4 engines of 16 and 32 bit trainers: weights are quantized where they have arrived.

An engine with `weight_block_size` keeps a weight as float8_e4m3fn, with a scale for each block: in float32, or in MXFP8
an exponent of one byte. A trainer sends it under the same name without a scale. The loader is then traced with the two
tensors that a checkpoint in block-fp8 would have. The program makes these out of whole blocks of the trainer's weight,
in bfloat16, and does with them what the loader does.

NVFP4 has two weights in a byte, and one more scale for a whole weight, which the trainer sends, see `block_formats`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box, Region, TensorSpec, split
from sglang_reshard.trace.block_formats import FP8, Blocks
from sglang_reshard.trace.geometry import contiguous_strides
from sglang_reshard.trace.program import Copy, Program

_CHUNK = 1 << 20  # elements that a CPU quantizes together: in float32 they fit its cache
_DEVICE_CHUNK = 1 << 23  # elements that another device, whose kernels take longer to launch, quantizes together
_STACK_ELEMENTS = 32 << 20  # of stacked matrices that are quantized at a time


class _Output(NamedTuple):
    """A part of quantized weights, or of their scales, and where it is copied to."""

    copy: Copy
    is_scale: bool
    stacked: tuple[int, ...]  # shape of the dimensions that the matrices are stacked along
    slices: tuple[slice, ...]  # of the weights, or scales, in that shape


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Whole blocks of a checkpoint tensor: in bfloat16 until all have arrived, and then quantized to live memory.

    shape    matrices, rows and columns
    outputs  of the quantized weights and their scales
    unit     of the arrivals that outputs are copied to, if they are repacked next
    whole    where the scale of the whole tensor arrives, in the same unit, if the format has one
    """

    shape: tuple[int, int, int]
    blocks: Blocks
    outputs: tuple[_Output, ...]
    unit: str | None = None
    whole: Copy | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch.bfloat16.itemsize

    @property
    def kind(self) -> tuple[object, ...]:
        return *self.shape[1:], self.blocks

    @staticmethod
    def finisher(
        members: Sequence[BlockWeights], memory: torch.Tensor, targets: Mapping[str, torch.Tensor]
    ) -> Callable[[], None]:
        """Returns what quantizes `members`, all of one kind, and copies their outputs to `targets`.

        memory  bytes that hold one after the other; overwritten
        """
        rows, columns = members[0].shape[1:]
        count = sum(member.shape[0] for member in members)
        quantizer = _Quantizer(memory.view(torch.bfloat16).view(count, rows, columns), members[0].blocks)
        first = 0
        for member in members:
            own = slice(first, first + member.shape[0])
            if member.whole is not None:
                scale = member.whole.destination(targets[member.whole.target])
                quantizer.whole.append(scale.reshape(1).expand(member.shape[0]))
            for output in member.outputs:
                whole = quantizer.scales if output.is_scale else quantizer.quantized
                value = whole[own].view(*output.stacked, *whole.shape[1:])[output.slices]
                destination = output.copy.destination(targets[output.copy.target])
                if value.dtype == FP8:  # copied as what every device copies
                    destination, value = destination.view(torch.uint8), value.view(torch.uint8)
                destinations, values = quantizer.outputs.setdefault(value.dtype, ([], []))
                destinations.append(destination)
                values.append(value)
            first = own.stop
        return quantizer.run


class _Quantizer:
    """Quantizes matrices in place.

    quantized  [n, rows, columns] in items of the format, at the beginning of the memory of the unquantized weights
    scales     [n, blocks of rows, blocks of columns]
    whole      scales of whole weights, in order, for formats with them; read when it runs
    outputs    destinations and values to copy to them, by dtype
    """

    def __init__(self, weights: torch.Tensor, blocks: Blocks) -> None:
        """`weights`: bfloat16 [n, rows, columns], contiguous."""
        self._weights, self._blocks = weights, blocks
        shape = blocks.items_shape(weights.shape)
        self.quantized = weights.view(-1).view(blocks.dtype)[: math.prod(shape)].view(shape)
        scales = blocks.scales_shape(weights.shape)
        self.scales = torch.empty(scales, dtype=blocks.scale_dtype, device=weights.device)
        self.whole: list[torch.Tensor] = []
        self.outputs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def run(self) -> None:
        count, rows, columns = self._weights.shape
        chunk = _CHUNK if self._weights.device.type == "cpu" else _DEVICE_CHUNK
        together = max(1, chunk // (rows * columns))
        down = self._blocks.size[0]
        high = max(1, chunk // (columns * down)) * down
        whole = torch.cat(self.whole) if self.whole else None
        for first, top in itertools.product(range(0, count, together), range(0, rows, high)):
            part = slice(first, first + together), slice(top, top + high)
            # Writes half as much of the memory, or less, as has been read until now.
            of_part = None if whole is None else whole[part[0]]
            quantized, scales = self._blocks.quantize(self._weights[part], of_part)
            self.quantized[part].copy_(quantized)
            self.scales[part[0], top // down : top // down + scales.shape[1]] = scales
        for destinations, values in self.outputs.values():
            torch._foreach_copy_(destinations, values)


def quantize_on_arrival(program: Program, specs: Mapping[str, TensorSpec], names: set[str], blocks: Blocks) -> Program:
    """Returns a program that takes the tensors `names` as `specs` has them, and quantizes them where they arrive.

    program  of a loader that was given `as_quantized` specs
    """
    quantized = {name: (name, False) for name in names} | {name + blocks.scale: (name, True) for name in names}
    of_tensor: dict[str, list[tuple[Copy, bool]]] = {}
    copies: list[Copy] = []
    for copy in program.copies:
        if copy.source in quantized:
            name, is_scale = quantized[copy.source]
            value, live = blocks.scale_dtype if is_scale else blocks.dtype, program.targets[copy.target].dtype
            if value != live:
                raise Unsupported(
                    f"{copy.source} is {value} where {name} is quantized, but {live} in {copy.target}: the engine "
                    "keeps it in two ways. Send it quantized, with its scale, or start the engine unquantized."
                )
            of_tensor.setdefault(name, []).append((copy, is_scale))
        else:
            copies.append(copy)
    whole = {copy.source: copy for copy in copies} if blocks.whole else {}
    arrivals: dict[str, BlockWeights] = {}
    for name, those in of_tensor.items():
        needed = [_blocks(copy.region, specs[name].shape, blocks, is_scale) for copy, is_scale in those]
        left = list(zip(needed, those, strict=True))
        for covering in _covering(needed):
            inside = [pair for box, pair in left if box.intersect(covering) == box]
            left = [(box, pair) for box, pair in left if box.intersect(covering) != box]
            for box in _cut_stack(covering):
                *stacked, rows, columns = box.shape
                outputs = tuple(_outputs(inside, box, blocks))
                target = f"{name} to be quantized"
                if box != covering or target in arrivals:
                    target += f", number {len(arrivals)}"
                unit = _repacking_unit(program, outputs)
                scale = _whole_scale(program, whole, name + blocks.whole, unit) if blocks.whole else None
                shape = math.prod(stacked), rows, columns
                arrivals[target] = BlockWeights(shape, blocks, outputs, unit, scale)
                copies.append(Copy(name, Region.of(box), target, 0, contiguous_strides(box.shape)))
    memory = {
        target: torch.empty(math.prod(weights.shape), dtype=torch.bfloat16, device="meta")
        for target, weights in arrivals.items()
    }
    in_order = {**arrivals, **program.arrivals}  # what is repacked has been quantized before
    return replace(program, copies=tuple(copies), targets=program.targets | memory, arrivals=in_order)


def _repacking_unit(program: Program, outputs: Sequence[_Output]) -> str | None:
    """Returns the unit of arrivals that `outputs` are copied to; None if they are copied to live memory."""
    targets = {output.copy.target for output in outputs}
    units = {program.arrivals[target].unit if target in program.arrivals else None for target in targets}
    if len(units) > 1:
        raise Unsupported(
            f"{', '.join(sorted(targets))} are parts of one weight, but the engine does not repack them together, "
            "which is not supported. Start the engine unquantized."
        )
    return units.pop()


def _whole_scale(program: Program, copies: Mapping[str, Copy], name: str, unit: str | None) -> Copy:
    """Returns the copy of the scale of a whole weight, which must arrive in the unit that the weight is repacked in."""
    copy = copies.get(name)
    arrival = program.arrivals.get(copy.target) if copy is not None else None
    if copy is None or copy.region.numel != 1 or arrival is None or arrival.unit != unit:
        raise Unsupported(
            f"{name} is not one value that the engine keeps with its weight, so it cannot quantize the weight. Send "
            "the weight quantized, or start the engine unquantized."
        )
    return copy


def _outputs(copies: Iterable[tuple[Copy, bool]], box: Box, blocks: Blocks) -> Iterator[_Output]:
    """Yields the parts of copies of quantized weights, or of scales, that a box of whole blocks makes."""
    for copy, is_scale in copies:
        unit = blocks.unit(is_scale)
        first = tuple(a // n for a, n in zip(box.start[-2:], unit, strict=True))
        last = tuple(-(-z // n) for z, n in zip(box.stop[-2:], unit, strict=True))
        of_copy = Box((*box.start[:-2], *first), (*box.stop[:-2], *last))
        if part := copy.within(of_copy):
            yield _Output(part, is_scale, box.shape[:-2], part.region.slices(of_copy.start))


def _cut_stack(box: Box) -> Iterator[Box]:
    """Cuts a stack of matrices that share no block into smaller ones."""
    stack = Box(box.start[:-2], box.stop[:-2])
    for part in split(stack, max(1, _STACK_ELEMENTS // math.prod(box.shape[-2:]))):
        yield Box((*part.start, *box.start[-2:]), (*part.stop, *box.stop[-2:]))


def _blocks(region: Region, shape: tuple[int, ...], blocks: Blocks, is_scale: bool) -> Box:
    """Returns the whole blocks of a weight of `shape` that a region of it quantized, or of its scales, lies in."""
    stop = tuple(a + (n - 1) * step + 1 for a, n, step in zip(region.start, region.count, region.step, strict=True))
    sizes = list(zip(blocks.unit(is_scale), blocks.size, strict=True))
    first = tuple(a * n // b * b for a, (n, b) in zip(region.start[-2:], sizes, strict=True))
    last = tuple(-(-z * n // b) * b for z, (n, b) in zip(stop[-2:], sizes, strict=True))
    end = tuple(map(min, last, shape[-2:]))
    return Box((*region.start[:-2], *first), (*stop[:-2], *end))


def _covering(boxes: Iterable[Box]) -> list[Box]:
    """Returns the boxes that no other one contains, in order."""
    kept: list[Box] = []
    for box in sorted(set(boxes), key=lambda box: -box.numel):
        if not any(other.intersect(box) == box for other in kept):
            kept.append(box)
    return sorted(kept)
