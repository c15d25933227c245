"""verl's shard contract: (name, flat local shard, ShardSpec) of every training engine that exports it.

What a ShardSpec says by mesh and placements all ranks know alike. A `place` says where this rank's block is and
nothing of the others': the ranks tell each other, once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, FusedTensor, blocks, fused_slices
from sglang_reshard.verl.exchange import Exchange


class _Blocks(msgspec.Struct, frozen=True):
    """A rank's block of each tensor that it places itself, by the tensor's name."""

    blocks: tuple[tuple[str, Box], ...]


class Contract:
    """One trainer rank's reading of it. Block geometry is learned at the first sync, and checked in later ones."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._own: _Blocks | None = None
        self._held: dict[str, ExplicitSharding] = {}
        self._parts: dict[str, Any] = {}

    def tensors(self, engine: Any) -> list[tuple[Any, ...]]:
        """What `describe` takes. Raises Unsupported for an engine that does not export shards."""
        try:
            exported, _ = engine.get_per_tensor_param_shard()
        except NotImplementedError as error:
            raise Unsupported(
                f"{type(engine).__name__} exports no shards (get_per_tensor_param_shard): {error}"
            ) from error
        given = [(name, shard, spec) for name, shard, spec in exported]
        self._learn(given)
        return [(name, shard, self._third(name, spec)) for name, shard, spec in given]

    def _learn(self, given: list[tuple[str, Any, Any]]) -> None:
        own = _Blocks(tuple((name, _block(name, spec)) for name, _, spec in given if spec.place is not None))
        if own == self._own or not own.blocks:
            return
        if self._own is not None:
            raise Mismatch("a trainer rank's blocks of tensors have moved since the first sync; start the run anew")
        shapes = {name: tuple(map(int, spec.full_shape)) for name, _, spec in given}
        for of_ranks in zip(*(ranks.blocks for ranks in self._exchange(own, _Blocks)), strict=True):
            name, _ = of_ranks[0]
            self._held[name] = blocks(shapes[name], [box for _, box in of_ranks])
        self._own = own

    def _third(self, name: str, spec: Any) -> Any:
        described = self._held.get(name, spec) if spec.place is not None else spec
        if spec.hf_slots is None:
            return described
        if name not in self._parts:
            self._parts[name] = fused_slices(spec.hf_slots, tuple(spec.full_shape), spec.to_hf_chunk)
        return FusedTensor(self._parts[name], described)


def _block(name: str, spec: Any) -> Box:
    place = spec.place
    if isinstance(place, int):
        raise Unsupported(
            f"{name}: its ShardSpec places it at a flat offset ({place}), which says nothing of its shape; "
            "export it with mesh and placements, or a BlockPlacement"
        )
    start = tuple(map(int, place.global_offset))
    return Box(start, tuple(a + int(n) for a, n in zip(start, place.local_shape, strict=True)))
