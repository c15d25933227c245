"""Trainer states drawn from a `Random`."""

from __future__ import annotations

from random import Random

import torch

from sglang_reshard.sources import SourceLayout
from support import plans


def shards_of(
    layout: SourceLayout, whole: dict[str, torch.Tensor], trainer_rank: int, random: Random
) -> list[torch.Tensor]:
    """A trainer rank's shards: with a storage of their own, in the middle of one, transposed in it, or with gaps."""
    return [_laid(shard, random) for shard in plans.shards(layout, whole, trainer_rank)]


def _laid(shard: torch.Tensor, random: Random) -> torch.Tensor:
    way = random.randrange(4)
    if way == 0 or not shard.numel():
        return shard
    if way == 3 and shard.dim():
        wide = torch.zeros(*shard.shape[:-1], 2 * shard.shape[-1] + 1, dtype=shard.dtype)
        return wide[..., 1::2].copy_(shard)
    if way == 1 and shard.dim() > 1:
        return shard.transpose(0, -1).contiguous().transpose(0, -1)
    begin = random.randrange(5)
    storage = torch.zeros(begin + shard.numel() + random.randrange(5), dtype=shard.dtype)
    return storage[begin : begin + shard.numel()].view(shard.shape).copy_(shard)
