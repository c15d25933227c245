"""Which part of a stacked tensor each checkpoint tensor is, learned from the converter that makes them.

A converter takes a run of rows (experts) and hands out named tensors, by slicing, transposing and renaming.
It is run once, over a row without bytes: what it hands out are views, and a view says which part of the row
it is. One that insists on reading or moving data is run over a row of element indices instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.fused import FusedSlice, Parts, as_slice

Converter = Callable[[int, torch.Tensor], Sequence[tuple[str, torch.Tensor]]]
Named = Sequence[tuple[str, Sequence[int]]]  # (name, shape)

_INDEX_BYTES = 1 << 30  # that a row of element indices may take: 8 bytes an element
_copies = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def fused_slices(names_and_shapes: Named, full_shape: Sequence[int], to_hf_chunk: Converter | None = None) -> Parts:
    """The parts of a stacked tensor of `full_shape` (elements) that verl's `ShardSpec.hf_slots` names.

    names_and_shapes  what the converter makes of all rows, one row after the other
    to_hf_chunk       the converter: (number of the first row, rows) -> [(name, tensor)]. Without one, each name
                      is a row. It is taken to do to every row what it does to row 0, but for numbers in names

    Raises Unsupported, naming the tensor, for names that are not what the converter makes, and for tensors that
    are no box of a row with its dimensions in some order.
    """
    shape = tuple(map(int, full_shape))
    told = [(name, tuple(map(int, size))) for name, size in names_and_shapes]
    if to_hf_chunk is None:
        part = FusedSlice((0,) * len(shape), (1, *shape[1:]), tuple(range(1, len(shape))))
        return _of_all_rows(told, shape, [(told[0][0] if told else "", part)])
    row = (1, *shape[1:])
    return _of_all_rows(told, shape, _from_views(to_hf_chunk, row) or _from_indices(to_hf_chunk, row))


def _of_all_rows(
    told: list[tuple[str, tuple[int, ...]]], shape: tuple[int, ...], of_row: list[tuple[str, FusedSlice]]
) -> Parts:
    """The parts of all rows from those of row 0."""
    if len(told) != shape[0] * len(of_row):
        raise Unsupported(
            f"{told[0][0] if told else 'a stack'}: {len(told)} names were given for {shape[0]} rows of {len(of_row)} "
            "tensors each"
        )
    patterns = [_pattern(name) for name, _ in of_row]
    found = []
    for number, (name, size) in enumerate(told):
        row, place = divmod(number, len(of_row))
        made, part = of_row[place]
        if _pattern(name) != patterns[place] or size != part.shape or (row == 0 and name != made):
            raise Unsupported(
                f"{name} of shape {size} is named where the converter makes {made} of shape {part.shape} of row 0; "
                "it has to treat all rows alike"
            )
        found.append((name, FusedSlice((row, *part.start[1:]), (row + 1, *part.stop[1:]), part.axes)))
    return tuple(found)


def _pattern(name: str) -> str:
    """A name, whatever its numbers."""
    return re.sub(r"\d+", "#", name)


def _from_views(to_hf_chunk: Converter, row: tuple[int, ...]) -> list[tuple[str, FusedSlice]] | None:
    """Run over a row without bytes; None unless all that comes out are views of it, and boxes."""
    whole = torch.empty(row, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), _Bytelessly() as mode:
        try:
            made = list(to_hf_chunk(0, whole))
        except Exception:  # whatever a converter makes of a tensor without data
            return None
    if mode.computed:
        return None
    memory = whole.untyped_storage()._cdata
    found = []
    for name, view in made:
        if view.dtype != whole.dtype or view.untyped_storage()._cdata != memory:
            return None
        part = as_slice(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()), row)
        if part is None:
            return None
        found.append((name, part))
    return found


class _Bytelessly(TorchDispatchMode):
    """Copies are what they are copies of: on another device, or contiguous, they have the same elements.

    computed  whether memory was written or anything was computed, which a view would not show
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _copies and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]
        self.computed |= not func.is_view
        return func(*args, **kwargs)


def _from_indices(to_hf_chunk: Converter, row: tuple[int, ...]) -> list[tuple[str, FusedSlice]]:
    """Run over a row of element indices, which then tell where each element went."""
    elements = torch.Size(row).numel()
    if 8 * elements > _INDEX_BYTES:
        raise Unsupported(
            f"the converter of a stack whose rows have {elements:,} elements does more than to slice and transpose "
            "them; give the checkpoint's tensors themselves"
        )
    try:
        with torch.no_grad():
            made = [(name, tensor.cpu()) for name, tensor in to_hf_chunk(0, torch.arange(elements).view(row))]
    except Exception as error:
        raise Unsupported(
            f"what the converter of a stack does with a row of shape {row} cannot be learned, neither without bytes "
            f"nor from integers ({type(error).__name__}: {error}); give the checkpoint's tensors themselves"
        ) from error
    return [(name, _from_index(name, indices, row)) for name, indices in made]


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
            f"{name} is no box of a row of shape {row} with its dimensions in some order: the converter computes or "
            "reorders; give the checkpoint's tensors themselves"
        )
    return part
