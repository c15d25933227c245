"""A model's live memory: spoiled before it is loaded, and compared by digests."""

from __future__ import annotations

import torch

from sglang_reshard.trace.kv_scales import is_default_scale
from sglang_reshard.trace.live import live_storages


def fill_with_garbage(model: torch.nn.Module) -> None:
    """The same every time. Small bytes: as floats they are tiny numbers, none of them NaN.

    Scales of the KV cache stay as they are: a trace looks whether a checkpoint has ever set them.
    """
    scales = {name: p.clone() for name, p in model.named_parameters() if is_default_scale(name, p)}
    generator = torch.Generator().manual_seed(7)
    for storage in live_storages(model).values():
        everything = torch.empty(0, dtype=torch.uint8).set_(storage.tensor.untyped_storage())
        everything.copy_(torch.randint(0, 60, everything.shape, generator=generator, dtype=torch.uint8))
    for name, scale in scales.items():
        model.get_parameter(name).data.copy_(scale)


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Paths whose digests differ, or that one of them lacks."""
    return sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
