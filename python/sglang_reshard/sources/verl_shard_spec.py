"""Reads verl's ShardSpec by its attributes, without importing verl.

full_shape          global shape, elements
mesh, placements    as of a DTensor; without a mesh every trainer rank holds the tensor in full
hf_slots            names and shapes of the checkpoint tensors it represents, for a fused tensor
to_hf_chunk         the converter of the fused tensor to those, if they are not its rows
place               this rank's block, if no mesh tells it: not read here, see `blocks`

A converter takes rows (experts) and returns named tensors, by slicing, transposing and renaming. It is traced once,
over a row without data, and tells so which slice of the fused tensor each checkpoint tensor is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.sources.fused import FusedSlice, FusedTensor, NamedSlices, slice_of_boxes
from sglang_reshard.trace.converter_trace import trace_converter

Converter = Callable[[int, torch.Tensor], Sequence[tuple[str, torch.Tensor]]]


def fused_tensor_of(where: str, spec: Any) -> FusedTensor | None:
    """Returns the fused tensor that a ShardSpec describes; None if it describes a tensor of its own name.

    Raises Unsupported, starting with `where`, for slots that cannot be read.
    """
    check_has_no_place(where, spec)
    converter, names = getattr(spec, "to_hf_chunk", None), getattr(spec, "hf_slots", None)
    if names is None:
        if converter is not None:
            raise Unsupported(f"{where}: its ShardSpec has `to_hf_chunk` without `hf_slots`; set both")
        return None
    try:
        return FusedTensor(fused_slices(names, tuple(spec.full_shape), converter), spec)
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from error


def check_has_no_place(where: str, spec: Any) -> None:
    """Raises Unsupported for a ShardSpec with a `place`."""
    if getattr(spec, "place", None) is not None:
        raise Unsupported(
            f"{where}: its ShardSpec has an explicit `place`, which locates this trainer rank's block, but not the "
            "blocks of others. sglang_reshard.verl exchanges them among trainer ranks. Outside verl, pass what "
            "sglang_reshard.sources.blocks returns for all of them"
        )


def blocks(shape: Sequence[int], boxes: Sequence[Box | None]) -> ExplicitSharding:
    """Returns the sharding of a tensor of global `shape` (elements) if each trainer rank has one box or None.

    A rank's local tensor is exactly its box, flat or in its shape; ranks with the same box hold replicas.
    """
    origin = (0,) * len(shape)
    held = ((box, origin, rank) for rank, box in enumerate(boxes) if box is not None and box.numel)
    return ExplicitSharding(tuple(map(int, shape)), ShardMap.of(held))


def fused_slices(
    names_and_shapes: Sequence[tuple[str, Sequence[int]]],
    full_shape: Sequence[int],
    to_hf_chunk: Converter | None = None,
) -> NamedSlices:
    """Returns the slices of a fused tensor of global `full_shape` (elements) that verl's `ShardSpec.hf_slots` names.

    names_and_shapes  what the converter returns for all rows, row by row
    to_hf_chunk       the converter: (number of the first row, rows) -> [(name, tensor)]. Without one, each name is a
                      row. It is assumed to treat every row as row 0, except for numbers in names

    Raises Unsupported, naming the tensor, for names that the converter does not return, and for tensors that are not a
    box of a row with its dimensions permuted.
    """
    shape = tuple(map(int, full_shape))
    named = [(name, tuple(map(int, size))) for name, size in names_and_shapes]
    row = (1, *shape[1:])
    if to_hf_chunk is None:
        slices = [(named[0][0] if named else "", FusedSlice((0,) * len(shape), row, tuple(range(1, len(shape)))))]
    else:
        slices = _of_row(to_hf_chunk, row)
    return _of_all_rows(named, shape, slices)


def _of_all_rows(
    named: list[tuple[str, tuple[int, ...]]], shape: tuple[int, ...], slices: list[tuple[str, FusedSlice]]
) -> NamedSlices:
    """Returns the slices of all rows, given those of row 0."""
    if len(named) != shape[0] * len(slices):
        raise Unsupported(
            f"{named[0][0] if named else 'a fused tensor'}: got {len(named)} names, but the converter returns "
            f"{len(slices)} tensors for each of {shape[0]} rows"
        )
    patterns = [_pattern(name) for name, _ in slices]
    shifts: dict[tuple[int, str], list[int]] = {}  # of the numbers in names, from row 0 on
    found = []
    for number, (name, size) in enumerate(named):
        row, place = divmod(number, len(slices))
        first_name, part = slices[place]
        shift = [new - first for new, first in zip(_numbers(name), _numbers(first_name), strict=False)]
        alike = _pattern(name) == patterns[place] and shifts.setdefault((row, patterns[place]), shift) == shift
        if not alike or size != part.shape or (row == 0 and name != first_name):
            raise Unsupported(
                f"{name} of shape {size} is listed where the converter returns {first_name} of shape {part.shape} for "
                "row 0. The converter must treat all rows alike"
            )
        found.append((name, FusedSlice((row, *part.start[1:]), (row + 1, *part.stop[1:]), part.axes)))
    return tuple(found)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _of_row(to_hf_chunk: Converter, row: tuple[int, ...]) -> list[tuple[str, FusedSlice]]:
    """Returns what the converter makes of row 0."""
    try:
        traced = trace_converter(lambda rows: dict(to_hf_chunk(0, rows)), row, torch.bfloat16)
    except Unsupported as error:
        raise Unsupported(f"{error}. Pass the checkpoint tensors separately") from error
    except Exception as error:
        raise Unsupported(
            f"the converter of a fused tensor does not run on a tensor of shape {row} without data "
            f"({type(error).__name__}: {error}); pass the checkpoint tensors separately"
        ) from error
    found = []
    for name, result in traced.items():
        part = slice_of_boxes(result.shape, result.boxes, row)
        if part is None:
            raise Unsupported(
                f"the converter computes or reorders {name}: it is not a slice of a row of shape {row} with its "
                "dimensions permuted. Pass the checkpoint tensors separately"
            )
        found.append((name, part))
    return found
