"""Reads DTensors whose local tensors are not what their placements say, as Megatron-FSDP's.

Megatron-FSDP cuts a buffer of many parameters into equal pieces, so that of each parameter ranks hold any number of
rows. Each local tensor states its own place, in the way in which torch's distributed checkpoints ask for it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box


def own_part(where: str, shape: tuple[int, ...], local: torch.Tensor) -> Box | None:
    """Returns the part of a tensor of global `shape` (elements) that a DTensor's local tensor states; None for nothing.

    Raises Mismatch, starting with `where`, for a part that is not the local tensor's or is outside of the shape, and
    Unsupported for several parts.
    """
    if not local.numel():
        return None
    chunks: list[Any] = local.__create_chunk_list__()  # type: ignore[attr-defined]
    if len(chunks) != 1:
        raise Unsupported(
            f"{where} has a local tensor with {len(chunks)} chunks; pass each chunk with an ExplicitSharding"
        )
    start, sizes = (tuple(map(int, numbers)) for numbers in (chunks[0].offsets, chunks[0].sizes))
    box = Box(start, tuple(map(operator.add, start, sizes)))
    alike = len(start) == len(sizes) == len(shape) and sizes == tuple(local.shape)
    if not alike or box.intersect(Box.whole(shape)) != box:
        raise Mismatch(
            f"{where} has a local tensor of shape {tuple(local.shape)}, but states the chunk {sizes} at {start} of "
            f"global shape {shape}. Call update_uneven_dtensor_chunk_metadata on it again, or pass an ExplicitSharding"
        )
    return box
