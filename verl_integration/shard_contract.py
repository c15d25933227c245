"""Reads verl's shard contract: (name, flat local shard, ShardSpec) from every training engine that exports it.

A ShardSpec's mesh and placements describe all ranks' shards. Its `place` describes only this rank's block, which is
stated as such: pass the tensors with partial=True.
"""

from __future__ import annotations

from typing import Any

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, FusedTensor, blocks, fused_slices


class ShardContract:
    """Reads one trainer rank's shards. Returns the same shardings as long as blocks stay as they are."""

    def __init__(self, trainer_ranks: int) -> None:
        self._trainer_ranks = trainer_ranks
        self._shardings: dict[tuple[tuple[int, ...], Box], ExplicitSharding] = {}
        self._slices: dict[str, Any] = {}

    def tensors(self, engine: Any) -> list[tuple[Any, ...]]:
        """Returns the arguments of `describe`. Raises Unsupported for an engine that does not export shards."""
        try:
            exported, _ = engine.get_per_tensor_param_shard()
        except NotImplementedError as error:
            raise Unsupported(
                f"{type(engine).__name__}.get_per_tensor_param_shard is not implemented: {error}"
            ) from error
        rows = ((name, shard, self._sharding(name, spec)) for name, shard, spec in exported)
        return [row for row in rows if row[2] is not None]

    def _sharding(self, name: str, spec: Any) -> Any:
        """Returns a tensor's sharding; None if this rank's block of it is empty."""
        shape, sharding = tuple(map(int, spec.full_shape)), spec
        if spec.place is not None:
            box = _block(name, spec)
            if not box.numel:
                return None
            if (shape, box) not in self._shardings:  # stated for all ranks: it counts for those that list the tensor
                self._shardings[shape, box] = blocks(shape, [box] * self._trainer_ranks)
            sharding = self._shardings[shape, box]
        if spec.hf_slots is None:
            return sharding
        if name not in self._slices:
            self._slices[name] = fused_slices(spec.hf_slots, shape, spec.to_hf_chunk)
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
