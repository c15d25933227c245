"""Decides which dtype casts a copy may make, and when several casts equal one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import ITEM_BYTES, TensorSpec

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
