"""Reads verl's shard contract: (name, flat local shard, ShardSpec) from every training engine that exports it.

A ShardSpec's mesh and placements describe all ranks' shards. Its `place` describes only this rank's block: the ranks
all-gather these once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, FusedTensor, blocks, fused_slices
from sglang_reshard.verl.shard_exchange import AllGather


class _Blocks(msgspec.Struct, frozen=True):
    """A rank's block of each tensor whose ShardSpec has a `place`, by the tensor's name."""

    blocks: tuple[tuple[str, Box], ...]


class ShardContract:
    """Reads one trainer rank's shards. Blocks are all-gathered at the first sync, and checked in later ones."""

    def __init__(self, all_gather: AllGather) -> None:
        self._all_gather = all_gather
        self._own: _Blocks | None = None
        self._shardings: dict[str, ExplicitSharding] = {}
        self._slices: dict[str, Any] = {}

    def tensors(self, engine: Any) -> list[tuple[Any, ...]]:
        """Returns the arguments of `describe`. Raises Unsupported for an engine that does not export shards."""
        try:
            exported, _ = engine.get_per_tensor_param_shard()
        except NotImplementedError as error:
            raise Unsupported(
                f"{type(engine).__name__}.get_per_tensor_param_shard is not implemented: {error}"
            ) from error
        shards = list(exported)
        self._gather_blocks(shards)
        return [(name, shard, self._sharding(name, spec)) for name, shard, spec in shards]

    def _gather_blocks(self, shards: list[tuple[str, Any, Any]]) -> None:
        own = _Blocks(tuple((name, _block(name, spec)) for name, _, spec in shards if spec.place is not None))
        if own == self._own or not own.blocks:
            return
        if self._own is not None:
            raise Mismatch("this trainer rank holds other blocks of tensors than in the first sync; restart the run")
        shapes = {name: tuple(map(int, spec.full_shape)) for name, _, spec in shards}
        for of_ranks in zip(*(ranks.blocks for ranks in self._all_gather(own, _Blocks)), strict=True):
            name, _ = of_ranks[0]
            self._shardings[name] = blocks(shapes[name], [box for _, box in of_ranks])
        self._own = own

    def _sharding(self, name: str, spec: Any) -> Any:
        sharding = self._shardings.get(name, spec) if spec.place is not None else spec
        if spec.hf_slots is None:
            return sharding
        if name not in self._slices:
            self._slices[name] = fused_slices(spec.hf_slots, tuple(spec.full_shape), spec.to_hf_chunk)
        return FusedTensor(self._slices[name], sharding)


def _block(name: str, spec: Any) -> Box:
    place = spec.place
    if isinstance(place, int):
        raise Unsupported(
            f"{name}: its ShardSpec has only a flat offset ({place}), which does not determine the shape; export it "
            "with mesh and placements, or with a BlockPlacement"
        )
    start = tuple(map(int, place.global_offset))
    return Box(start, tuple(a + int(n) for a, n in zip(start, place.local_shape, strict=True)))
