"""verl's ShardSpec, read by its attributes, and what its explicit blocks come down to.

full_shape          of the whole tensor, elements
mesh, placements    as of a DTensor; without a mesh every trainer rank holds the whole
hf_slots            names and shapes of the checkpoint tensors that it stands for, if it is a stack
to_hf_chunk         how the stack becomes those, if not row by row
place               this rank's block, where no mesh says it: not read here, see `blocks`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.sources.dtensor import DescribedTensor, Meshes, plain
from sglang_reshard.sources.fused import FusedTensor
from sglang_reshard.sources.layout_probe import fused_slices


def from_shard_spec(where: str, local: torch.Tensor, spec: Any, meshes: Meshes) -> DescribedTensor:
    """A flat local shard and its ShardSpec. Raises Unsupported, with `where`, for one with a `place`."""
    _check_place(where, spec)
    shape = tuple(spec.full_shape)
    if spec.mesh is None:
        return plain(shape, local, meshes)
    return DescribedTensor(shape, meshes.read(where, spec.mesh, tuple(spec.placements)), local)


def stack_of(where: str, spec: Any) -> FusedTensor | None:
    """The stack that a ShardSpec stands for; None if it stands for a tensor of its own name."""
    converter = getattr(spec, "to_hf_chunk", None)
    names = getattr(spec, "hf_slots", None)
    if converter is None and names is None:
        return None
    _check_place(where, spec)
    if names is None:
        raise Unsupported(f"{where}: a ShardSpec with `to_hf_chunk` has to say by `hf_slots` what that makes")
    try:
        return FusedTensor(fused_slices(names, tuple(spec.full_shape), converter), spec)
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from error


def blocks(shape: Sequence[int], boxes: Sequence[Box | None]) -> ExplicitSharding:
    """How a tensor of `shape` is held by trainer ranks of which each has one box of it, or none.

    A rank's local tensor is exactly its box, flat or in its shape; ranks with the same box hold replicas.
    """
    origin = (0,) * len(shape)
    held = ((box, origin, rank) for rank, box in enumerate(boxes) if box is not None and box.numel)
    return ExplicitSharding(tuple(map(int, shape)), ShardMap.of(held))


def _check_place(where: str, spec: Any) -> None:
    if getattr(spec, "place", None) is not None:
        raise Unsupported(
            f"{where}: a ShardSpec with an explicit `place` says where this trainer rank's block is, and nothing of "
            "the others'. sglang_reshard.verl exchanges them among trainer ranks; elsewhere give what "
            "sglang_reshard.sources.blocks makes of all of them"
        )
