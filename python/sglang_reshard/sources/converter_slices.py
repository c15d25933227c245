"""Determines which slice of a fused tensor each checkpoint tensor is, by running the converter that creates them.

A converter takes rows (experts) and returns named tensors, by slicing, transposing and renaming. It runs once, on a
row on the meta device: what it returns are views, and a view tells its box of the row. A converter that reads or moves
data runs on a row of element indices instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.fused import FusedSlice, NamedSlices, as_slice
from sglang_reshard.torch_private import TorchDispatchMode

Converter = Callable[[int, torch.Tensor], Sequence[tuple[str, torch.Tensor]]]

_MAX_INDEX_BYTES = 1 << 30  # of a row of element indices, 8 bytes per element
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


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
        slices = _from_views(to_hf_chunk, row) or _from_indices(to_hf_chunk, row)
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


def _from_views(to_hf_chunk: Converter, row: tuple[int, ...]) -> list[tuple[str, FusedSlice]] | None:
    """Runs the converter on a meta tensor. Returns None unless it returns only views of it that are boxes."""
    whole = torch.empty(row, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), _MetaCopies() as mode:
        try:
            returned = list(to_hf_chunk(0, whole))
        except Exception:  # a converter may raise anything on a tensor without data
            return None
    if mode.computed:
        return None
    memory = whole.untyped_storage()._cdata
    found = []
    for name, view in returned:
        if view.dtype != whole.dtype or view.untyped_storage()._cdata != memory:
            return None
        part = as_slice(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()), row)
        if part is None:
            return None
        found.append((name, part))
    return found


class _MetaCopies(TorchDispatchMode):
    """Returns the input of every copy: moved to another device or made contiguous, it has the same elements.

    computed  whether anything was computed or memory was written, which views do not show
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]
        self.computed |= not func.is_view
        return func(*args, **kwargs)


def _from_indices(to_hf_chunk: Converter, row: tuple[int, ...]) -> list[tuple[str, FusedSlice]]:
    """Runs the converter on a row of element indices, which then tell where each element went."""
    elements = torch.Size(row).numel()
    if 8 * elements > _MAX_INDEX_BYTES:
        raise Unsupported(
            f"the converter of a fused tensor with {elements:,} elements per row does more than slicing and "
            "transposing; pass the checkpoint tensors separately"
        )
    try:
        with torch.no_grad():
            returned = [(name, tensor.cpu()) for name, tensor in to_hf_chunk(0, torch.arange(elements).view(row))]
    except Exception as error:
        raise Unsupported(
            f"the converter of a fused tensor runs neither on a meta tensor nor on an int64 tensor of shape {row} "
            f"({type(error).__name__}: {error}); pass the checkpoint tensors separately"
        ) from error
    return [(name, _from_index(name, indices, row)) for name, indices in returned]


def _from_index(name: str, indices: torch.Tensor, row: tuple[int, ...]) -> FusedSlice:
    part = None
    if indices.dtype == torch.int64 and indices.numel():
        first = indices[(0,) * indices.dim()]
        strides = tuple(
            int(indices[tuple(int(d == axis) for d in range(indices.dim()))] - first) if length > 1 else 0
            for axis, length in enumerate(indices.shape)
        )
        expected = first.clone()
        for length, stride in zip(indices.shape, strides, strict=True):
            expected = expected.unsqueeze(-1) + stride * torch.arange(length)
        if torch.equal(expected, indices):
            part = as_slice(int(first), tuple(indices.shape), strides, row)
    if part is None:
        raise Unsupported(
            f"the converter computes or reorders {name}: it is not a slice of a row of shape {row} with its dimensions "
            "permuted. Pass the checkpoint tensors separately"
        )
    return part
