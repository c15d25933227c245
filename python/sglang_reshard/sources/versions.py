"""The version counters of tensors that are written behind autograd's back, which `copy_` would have increased.

Autograd compares them to refuse a backward through a value that has been overwritten since its forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sglang_reshard.sources.fsdp import ShardedParameters
from sglang_reshard.sources.memory_identity import is_partitioned


class VersionCounters:
    """Those of tensors passed by name, as `describe` takes them. Keeps no tensor itself alive, but its memory."""

    def __init__(self, named_tensors: Iterable[tuple[Any, ...]]) -> None:
        sharded = ShardedParameters.of_this_process()
        written: list[Any] = []
        for name, tensor, *sharding in named_tensors:
            written.append(tensor if sharding and sharding[0] is not None else sharded.of(name, tensor))
        written += [tensor.ds_tensor for tensor in written if is_partitioned(tensor)]
        # What detach() returns has the same counter. Tensors of inference mode have none.
        self._sharing = [tensor.detach() for tensor in written if not tensor.is_inference()]

    def increase(self) -> None:
        """Counts a write to each, in one call."""
        torch.autograd.graph.increment_version(self._sharing)
