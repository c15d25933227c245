"""Integer geometry of sharded tensors: which elements a rank holds, without torch.

regions         `Box` and `Region`: contiguous and strided boxes of element indices, half-open
shard_map       `ShardMap`: the boxes of one tensor, and which trainer ranks hold each, where in their local tensors
shard_map       `ShardMap`: the boxes of one tensor, which trainer ranks hold each, and where in their local tensor
difference      the first difference between two trainer ranks' layouts, for an error message
"""

from __future__ import annotations

from typing import Any

from sglang_reshard import _deprecated


def __getattr__(name: str) -> Any:
    return _deprecated.attribute(__name__, name)
