"""The formats of weights that are quantized where they arrive: block-fp8, MXFP8 and NVFP4.

NVFP4 has two weights in a byte, a float8_e4m3fn scale for 16 columns, and a float32 scale for the whole weight. That
one depends on all elements of a weight, and an engine rank holds only a part of them. Fused layers have one together.
So the trainer sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(FP8).max
MX_COLUMNS = 32  # that share a scale in MXFP8
COLUMNS = 16  # that share a scale
WHOLE = "_scale_2"  # the suffix of the scale of a whole weight
_LARGEST = 6.0  # of E2M1
# Between the absolute values of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A value in the middle goes to the even code, so
# every second bound is the next smaller number.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A format; its defaults are those of block-fp8.

    size         rows and columns that share a scale
    name         of the format
    scale        the suffix that makes the name of the scales out of that of a weight
    whole        the suffix of the scale of a whole weight, which the trainer sends; empty if the format has none
    dtype        of quantized weights
    scale_dtype  of scales
    item         rows and columns of a weight that one element of the quantized weight has
    columns      a weight's columns are a multiple of these
    """

    size: tuple[int, int]
    name: str = "block-fp8"
    scale: str = "_scale_inv"
    whole: str = ""
    dtype: torch.dtype = FP8
    scale_dtype: torch.dtype = torch.float32
    item: tuple[int, int] = (1, 1)
    columns: int = 1

    def quantize(self, weights: torch.Tensor, whole: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns quantized weights and scales of `weights` [n, rows, columns]. `whole`: [n] scales, if there are."""
        if whole is not None:
            return quantize_nvfp4(weights, whole)
        return quantize_mx(weights) if self.name == MXFP8.name else quantize_blocks(weights, self.size)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of matrices of `shape`."""
        return *shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], self.size, strict=True))

    def items_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the quantized matrices of `shape`."""
        return *shape[:-2], *(n // own for n, own in zip(shape[-2:], self.item, strict=True))

    def unit(self, is_scale: bool) -> tuple[int, int]:
        return self.size if is_scale else self.item


# Scales are powers of two, kept as exponents (UE8M0).
MXFP8 = Blocks((1, MX_COLUMNS), "MXFP8", scale_dtype=torch.uint8, columns=MX_COLUMNS)
# As ModelOpt writes it.
NVFP4 = Blocks((1, COLUMNS), "NVFP4", "_scale", WHOLE, torch.uint8, FP8, item=(1, 2), columns=COLUMNS)


def blocks_of(model: torch.nn.Module) -> Blocks | None:
    """Returns how a model keeps weights that are quantized on arrival, as SGLang's quantization methods say; None if it
    keeps none.
    """
    for module in model.modules():
        config = getattr(getattr(module, "quant_method", None), "quant_config", None)
        if found := getattr(config, "weight_block_size", None):
            size = int(found[0]), int(found[1])
            return replace(MXFP8, size=size) if getattr(config, "use_mxfp8", False) else Blocks(size)
        if getattr(config, "is_checkpoint_nvfp4_serialized", False) and getattr(config, "group_size", 0) == COLUMNS:
            return NVFP4
    return None


def quantize_nvfp4(weights: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns packed weights, uint8 [n, rows, columns / 2], and their scales, float8_e4m3fn [n, rows, columns / 16].

    weights  [n, rows, columns], floating-point
    whole    float32 [n], the scales of the whole weights

    The arithmetic is that of ModelOpt's NVFP4QTensor, to the bit: a scale is the largest absolute value of 16 columns
    divided by 6 times the weight's own scale, 1 for zeros, and at least 1/512.
    """
    wide = weights.to(torch.float32).unflatten(-1, (-1, COLUMNS))
    whole = whole.view(-1, 1, 1)
    scales = wide.abs().amax(dim=-1) / (whole * _LARGEST)
    scales = scales.masked_fill_(scales == 0, 1.0).clamp_(2**-9, _MAX).to(FP8)
    scaled = (wide / (scales.to(torch.float32) * whole).unsqueeze(-1)).flatten(-2)
    bounds = torch.tensor(_BOUNDS, device=weights.device)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros((), device=weights.device))
    codes = torch.bucketize(scaled.abs(), bounds, out_int32=True).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return codes[..., 1::2] << 4 | codes[..., 0::2], scales


def quantize_blocks(weights: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float8_e4m3fn weights and float32 scales, [n, rows, columns] and [n, blocks of rows, of columns].

    weights  [n, rows, columns], floating-point. The last blocks of rows and columns may be smaller than `block`

    The arithmetic is that of verl's quantizer in torch (`verl.utils.kernel.fp8_kernel`), to the bit: a block's scale
    is the reciprocal of 448 divided by its largest absolute value, both in float32; 1 for a block of zeros.
    """
    n, rows, columns = weights.shape
    down, across = (-(-size // b) for size, b in zip((rows, columns), block, strict=True))
    padding = (0, across * block[1] - columns, 0, down * block[0] - rows)
    wide = weights.to(torch.float32, copy=True)
    if any(padding):
        wide = torch.nn.functional.pad(wide, padding)
    blocks = wide.view(n, down, block[0], across, block[1])
    largest = blocks.abs().amax(dim=(2, 4), keepdim=True)
    factors = torch.full_like(largest, _MAX).div_(largest)  # `_MAX / largest` multiplies by a reciprocal
    factors.masked_fill_((largest == 0) | (largest == torch.inf), 1.0)
    scaled = blocks.mul_(factors).clamp_(-_MAX, _MAX).to(FP8)
    quantized = scaled.view(n, down * block[0], across * block[1])[:, :rows, :columns]
    return quantized, factors.reciprocal().view(n, down, across)


def quantize_mx(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float8_e4m3fn weights, and the exponents of their scales: uint8 [n, rows, columns / 32].

    weights  [n, rows, columns], floating-point

    The arithmetic is that of `downcast_to_mxfp` in triton_kernels, which SGLang quantizes with, to the bit: a scale is
    the largest absolute value of 32 columns divided by 448, rounded up to a power of two.
    """
    wide = weights.to(torch.float32).unflatten(-1, (-1, MX_COLUMNS))
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scales = largest / torch.full_like(largest, _MAX)  # a division by a number multiplies by its reciprocal on a GPU
    exponents = (scales.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000)
    rounded = exponents.view(torch.float32)
    factors = rounded.reciprocal().masked_fill_(rounded == 0, 0.0)
    quantized = (wide * factors).clamp_(-_MAX, _MAX).to(FP8)
    return quantized.flatten(-2), (exponents >> 23).to(torch.uint8).squeeze(-1)
