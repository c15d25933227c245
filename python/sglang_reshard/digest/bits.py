"""The bits of elements, as integers that torch and numpy calculate with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sglang_reshard.digest.coefficients import WORD_BYTES

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def readable(view: torch.Tensor, cast: bool) -> torch.Tensor:
    """The view as `units` takes it: as integers, which torch can stack whatever they stand for, unless it is cast."""
    return view if cast else view.view(_INTEGERS[view.element_size()])


def units(views: Sequence[torch.Tensor], dtype: torch.dtype, cast: bool, packed: bool) -> torch.Tensor:
    """Bits of `readable` views of one shape, as `dtype`: integers [views, *leading dimensions, units of a row].

    A unit is an element of up to 32 bits, or half of one of 64 bits; with `packed`, the two or four elements of a
    32-bit word. Their signs mean nothing.

    cast  whether an update converts the elements: they are as a copy would make them, but for NaNs
    """
    bits = torch.stack(list(views)) if len(views) > 1 else views[0].unsqueeze(0)
    if cast:
        bits = readable(_converted(bits, dtype), cast=False)
    if dtype.itemsize > WORD_BYTES or packed:
        # `contiguous` leaves a dimension of one element the stride it has, and torch then refuses the view.
        bits = (bits if _in_words(bits) else bits.clone(memory_format=torch.contiguous_format)).view(torch.int32)
    return bits


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As dtype, and all NaNs with one pattern: which one a cast makes depends on where in a vector register it was."""
    values = values.to(dtype)
    if not dtype.is_floating_point or (values.device.type == "cpu" and not values.sum().isnan()):
        return values
    return values.masked_fill(values.isnan(), math.nan)


def _in_words(bits: torch.Tensor) -> bool:
    """Whether torch can look at what is there as 32-bit words."""
    begins = (bits.storage_offset(), *bits.stride()[:-1])
    return bits.stride(-1) == 1 and all(n * bits.element_size() % WORD_BYTES == 0 for n in begins)
