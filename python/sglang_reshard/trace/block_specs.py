"""Checkpoint tensors of formats in blocks: those that a trainer sends unquantized, and their quantized specs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import FP8, Blocks
from sglang_reshard.trace.casts import torch_dtype
from sglang_reshard.trace.lazy_storage import checkpoint_tensors
from sglang_reshard.trace.memory import Record


def wider(specs: Sequence[TensorSpec], blocks: Blocks) -> set[str]:
    """Returns the names of the checkpoint tensors that could be weights to quantize: those without a scale."""
    return {spec.name for spec in without_scales(specs, (blocks.scale,))}


def without_scales(specs: Sequence[TensorSpec], scales: Sequence[str]) -> list[TensorSpec]:
    """Returns the matrices in 16 and 32 bits that are sent without any scale of those names."""
    names = {spec.name for spec in specs}
    matrices = (s for s in specs if len(s.shape) > 1 and not any(s.name + scale in names for scale in scales))
    return [spec for spec in matrices if torch_dtype(spec).is_floating_point and spec.item_bytes > 1]


def with_whole_scale(specs: Sequence[TensorSpec], blocks: Blocks) -> set[str]:
    """Returns the names of the weights that a trainer sends to be quantized with the scale that it sends, too."""
    names = {spec.name for spec in specs}
    return {name for name in wider(specs, blocks) if name + blocks.whole in names}


def sources_of_fp8(records: Iterable[Record]) -> set[str]:
    """Returns the names of the checkpoint tensors that are written as float8_e4m3fn."""
    return {
        tensor.spec.name for record in records if record.dtype == FP8 for tensor in checkpoint_tensors(record.content)
    }


def in_fp8(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype=str(FP8).removeprefix("torch."))


def as_quantized(specs: Iterable[TensorSpec], names: set[str], blocks: Blocks) -> list[TensorSpec]:
    """Returns what a quantized checkpoint has in place of `specs`, if `names` are quantized in it."""
    found = []
    for spec in specs:
        if spec.name not in names:
            found.append(spec)
            continue
        if spec.shape[-1] % blocks.columns:
            raise Unsupported(
                f"{spec.name} has {spec.shape[-1]} columns, and {blocks.name} has a scale for each {blocks.columns}. "
                "Start the engine unquantized."
            )
        dtype, of_scales = (str(one).removeprefix("torch.") for one in (blocks.dtype, blocks.scale_dtype))
        found.append(TensorSpec(spec.name, blocks.items_shape(spec.shape), dtype))
        found.append(TensorSpec(spec.name + blocks.scale, blocks.scales_shape(spec.shape), of_scales))
    return found
