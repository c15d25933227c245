"""Tied weights: tensors given under several names that are one and the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_reshard.layout.source_layout import SourceLayout


def tied_names(layout: SourceLayout, shards: Sequence[torch.Tensor]) -> dict[str, str]:
    """Name -> the first name under which the same tensor was given, for tensors that came before.

    The same means the same memory with the same local shape and strides, and the same global shape,
    dtype and distribution: tensors that are fused into one local tensor are different pieces of it. A
    rank that holds no element of a tensor cannot tell, and leaves it out, so ranks may differ where
    shards are empty.
    """
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for tensor, shard in zip(layout.tensors, shards, strict=True):
        if shard.numel() == 0:
            continue
        key = (
            (shard.device, shard.data_ptr(), tuple(shard.shape), shard.stride()),
            (tensor.shape, tensor.dtype, tensor.mesh, tensor.placements),
        )
        earlier = first.setdefault(key, tensor.name)
        if earlier != tensor.name:
            tied[tensor.name] = earlier
    return tied
