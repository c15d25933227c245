"""Reads verl's ShardSpec by its attributes, without importing verl.

full_shape          global shape, elements
mesh, placements    as of a DTensor; without a mesh every trainer rank holds the tensor in full
hf_slots            names and shapes of the checkpoint tensors it represents, for a fused tensor
to_hf_chunk         the converter of the fused tensor to those, if they are not its rows
place               this rank's block, if no mesh tells it: not read here, see `blocks`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.sources.converter_slices import fused_slices
from sglang_reshard.sources.fused import FusedTensor


def fused_tensor_of(where: str, spec: Any) -> FusedTensor | None:
    """Returns the fused tensor that a ShardSpec describes; None if it describes a tensor of its own name.

    Raises Unsupported, starting with `where`, for slots that cannot be read.
    """
    check_has_no_place(where, spec)
    converter, names = getattr(spec, "to_hf_chunk", None), getattr(spec, "hf_slots", None)
    if names is None:
        if converter is not None:
            raise Unsupported(f"{where}: its ShardSpec has `to_hf_chunk` without `hf_slots`; set both")
        return None
    try:
        return FusedTensor(fused_slices(names, tuple(spec.full_shape), converter), spec)
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from error


def check_has_no_place(where: str, spec: Any) -> None:
    """Raises Unsupported for a ShardSpec with a `place`."""
    if getattr(spec, "place", None) is not None:
        raise Unsupported(
            f"{where}: its ShardSpec has an explicit `place`, which locates this trainer rank's block, but not the "
            "blocks of others. sglang_reshard.verl exchanges them among trainer ranks. Outside verl, pass what "
            "sglang_reshard.sources.blocks returns for all of them"
        )


def blocks(shape: Sequence[int], boxes: Sequence[Box | None]) -> ExplicitSharding:
    """Returns the sharding of a tensor of global `shape` (elements) if each trainer rank has one box or None.

    A rank's local tensor is exactly its box, flat or in its shape; ranks with the same box hold replicas.
    """
    origin = (0,) * len(shape)
    held = ((box, origin, rank) for rank, box in enumerate(boxes) if box is not None and box.numel)
    return ExplicitSharding(tuple(map(int, shape)), ShardMap.of(held))
