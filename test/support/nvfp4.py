"""NVFP4 as ModelOpt writes it: by its definition, one element after the other in value, and slowly."""

from __future__ import annotations

import torch

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 16


def whole_scale(*weights: torch.Tensor) -> torch.Tensor:
    """Returns the scale of weights that have one: the largest of them becomes 6 times 448."""
    return torch.stack([weight.abs().max().float() for weight in weights]).max() / 2688


def quantized(weight: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes of two codes, the first in the low bits, and a float8_e4m3fn scale for each 16 columns."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scales = groups.abs().amax(-1) / (6 * whole)
    scales = torch.where(scales == 0, torch.ones(()), scales).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * whole)[..., None]
    distances = (scaled.abs().clamp(max=6).double()[..., None] - VALUES.double()).abs()
    near = distances == distances.min(-1, keepdim=True).values
    even = torch.arange(8) % 2 == 0
    codes = torch.where(near.sum(-1, keepdim=True) > 1, near & even, near).float().argmax(-1)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8).view(rows, columns // 2, 2)
    return codes[..., 0] + 16 * codes[..., 1], scales
