"""Tells which names are one tensor in the source, by the word of all ranks that hold some of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_reshard.plan import TensorIndex


class SourceTies:
    """Two names are tied if every rank that holds elements of either has them in the same memory."""

    def __init__(self, index: TensorIndex, by_rank: Sequence[Mapping[str, str]]) -> None:
        """`by_rank` has each rank's `tied_names`."""
        self._index, self._by_rank = index, by_rank

    def __call__(self, a: str, b: str) -> bool:
        holders = self._holders(a) | self._holders(b)
        return all(tied.get(a, a) == tied.get(b, b) for tied in (self._by_rank[rank] for rank in holders))

    def _holders(self, name: str) -> set[int]:
        shard_map = self._index.tensor_class(self._index.index_of[name]).shard_map
        return {rank for shard in shard_map.shards for rank in shard.ranks}
