"""A trainer rank's shard of one checkpoint tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_reshard.layout.source_layout import Sharding


class LocalShard(NamedTuple):
    """A checkpoint tensor with this rank's shard of it, a view of the input's local tensor; empty if it has none."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding
    tensor: torch.Tensor
