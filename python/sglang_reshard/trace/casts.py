"""Which casts a copy makes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import ITEM_BYTES, TensorSpec


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None) if spec.dtype in ITEM_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(
            f"{spec.name} has the dtype {spec.dtype}, which cannot be carried. Send it in one of: "
            f"{', '.join(sorted(ITEM_BYTES))}."
        )
    return dtype


@cache
def holds_exactly(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if narrow == wide:
        return True
    if narrow.is_floating_point and wide.is_floating_point:
        a, b = torch.finfo(narrow), torch.finfo(wide)
        # float8_e8m0fnu is powers of two only: nothing else fits into it.
        if wide == getattr(torch, "float8_e8m0fnu", None):
            return False
        return b.eps <= a.eps and b.max >= a.max and b.tiny * b.eps <= a.tiny * a.eps
    if torch.bool in (narrow, wide) or narrow.is_floating_point or wide.is_floating_point:
        return False
    i, j = torch.iinfo(narrow), torch.iinfo(wide)
    return j.min <= i.min and i.max <= j.max


def one_cast_does(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether casting through all of these is the same as casting from the first to the last."""
    steps = [d for i, d in enumerate(dtypes) if i == 0 or d != dtypes[i - 1]]
    return all(holds_exactly(steps[0], d) for d in steps[1:-1])


def check_cast(source: str, have: torch.dtype, target: str, want: torch.dtype) -> None:
    """Refuse a copy that torch would make, but whose values mean nothing."""
    if have == want:
        return
    if have.is_floating_point != want.is_floating_point:
        raise Unsupported(
            f"{source} is {have} and the engine's {target} is {want}: a copy would not keep the values. "
            "Send the tensor in the form in which the engine keeps it."
        )
    if want.is_floating_point and want.itemsize == 1:
        raise Unsupported(
            f"{source} is {have} and the engine's {target} is {want}: a plain cast is no quantization. Send the "
            "quantized tensor and its scale, or start the engine unquantized."
        )
