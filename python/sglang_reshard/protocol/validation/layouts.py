"""Validates a trainer's source layout."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import ITEM_BYTES
from sglang_reshard.layout.shard_map import ExplicitSharding, invalid_reason
from sglang_reshard.layout.source_layout import EXPLICIT, Mesh, Placement, SourceLayout, SourceTensor

MAX_TRAINER_RANKS = 1 << 17  # what a plan has bits for
MAX_DIMS = 16
MAX_TENSOR_BYTES = 1 << 60  # so that sums of a few are still 64-bit numbers
MAX_CUTS = 1 << 22  # intervals, over all kinds of tensors
MAX_EXPLICIT_SHARDS = 1 << 18  # of one tensor
MAX_SHARDS = 1 << 29  # of all tensors


def check_layout(layout: SourceLayout, trainer_ranks: int) -> None:
    """Raises Mismatch, naming the tensor, for a layout that is not valid for this number of trainer ranks.

    Tensors that are alike but for their names are checked once.
    """
    if not 1 <= layout.trainer_ranks == trainer_ranks <= MAX_TRAINER_RANKS:
        raise Mismatch(
            f"invalid source layout: it describes {layout.trainer_ranks} trainer ranks, but the update has "
            f"{trainer_ranks}; both must be equal, and at most {MAX_TRAINER_RANKS:,}"
        )
    kinds: dict[tuple[tuple[int, ...], str, int, int], list[str]] = {}
    for tensor in layout.tensors:
        kinds.setdefault((tensor.shape, tensor.dtype, tensor.mesh, tensor.placements), []).append(tensor.name)
    if twice := _first_repeated(tensor.name for tensor in layout.tensors):
        raise Mismatch(f"invalid source layout: it lists tensor {twice} twice; names must be unique")
    meshes = [_invalid_mesh_reason(mesh, trainer_ranks) for mesh in layout.meshes]
    cuts = shards = 0
    for key, names in kinds.items():
        tensor = SourceTensor(names[0], *key)
        why = _invalid_reason(tensor, layout, meshes)
        if not why and tensor.mesh != EXPLICIT:
            cuts += _cuts(layout.meshes[tensor.mesh], layout.placements[tensor.placements])
            if cuts > MAX_CUTS:
                why = f"it and the tensors before it are split into more than {MAX_CUTS:,} intervals"
        if not why:
            held = layout.shard_map(tensor)
            shards += len(names) * len(held.shards)
            if shards > MAX_SHARDS:
                why = f"it and the tensors before it have more than {MAX_SHARDS:,} shards"
            elif held.covered_elements() != math.prod(tensor.shape):
                why = f"trainer ranks hold {held.covered_elements()} of its {math.prod(tensor.shape)} elements"
        if why:
            raise Mismatch(
                f"invalid source layout: {tensor.name}: {why}. Was it published by sglang_reshard.WeightSender?"
            )


def _invalid_reason(tensor: SourceTensor, layout: SourceLayout, meshes: list[str]) -> str:
    """Returns why a tensor's sharding is invalid, as far as is known without computing it; empty if it is valid."""
    shape = tensor.shape
    if tensor.dtype not in ITEM_BYTES:
        return f"the dtype {tensor.dtype!r} is not supported"
    if len(shape) > MAX_DIMS or any(n < 0 for n in shape):
        return f"the shape {shape} is invalid: a tensor has at most {MAX_DIMS} dimensions, none of them negative"
    if math.prod(max(1, n) for n in shape) * ITEM_BYTES[tensor.dtype] > MAX_TENSOR_BYTES:
        return f"the shape {shape} has more than {MAX_TENSOR_BYTES:,} bytes"
    if tensor.mesh == EXPLICIT:
        if not 0 <= tensor.placements < len(layout.explicit):
            return f"the layout has no explicit sharding number {tensor.placements}"
        stated = layout.explicit[tensor.placements]
        if len(stated.shards) > MAX_EXPLICIT_SHARDS:
            return f"it has {len(stated.shards):,} shards, more than {MAX_EXPLICIT_SHARDS:,}"
        return invalid_reason(ExplicitSharding(shape, stated), layout.trainer_ranks) or ""
    if not 0 <= tensor.mesh < len(layout.meshes) or not 0 <= tensor.placements < len(layout.placements):
        return f"the layout has no mesh number {tensor.mesh}, or no placements number {tensor.placements}"
    mesh, placements = layout.meshes[tensor.mesh], layout.placements[tensor.placements]
    return meshes[tensor.mesh] or _invalid_placements_reason(placements, mesh, shape)


def _invalid_mesh_reason(mesh: Mesh, trainer_ranks: int) -> str:
    if not 1 <= len(mesh.shape) <= MAX_DIMS or any(n < 1 for n in mesh.shape):
        return f"its mesh of shape {mesh.shape} has an invalid number or size of dimensions"
    if math.prod(mesh.shape) != len(mesh.ranks):
        return f"its mesh of shape {mesh.shape} has {len(mesh.ranks)} ranks"
    members = [rank for rank in mesh.ranks if rank != -1]
    if any(not 0 <= rank < trainer_ranks for rank in members):
        return f"its mesh has trainer ranks that are not in this update, which has {trainer_ranks}"
    if len(set(members)) != len(members):
        return "its mesh lists a trainer rank twice"
    return ""


def _invalid_placements_reason(placements: tuple[Placement, ...], mesh: Mesh, shape: tuple[int, ...]) -> str:
    dims = len(shape)
    if len(placements) != len(mesh.shape):
        return f"it has {len(placements)} placements on a mesh of {len(mesh.shape)} dimensions"
    if any(not -1 <= p.dim < dims for p in placements):
        return f"it has {dims} dimensions, but its placements {placements} shard other dimensions"
    if any(not 1 <= p.split_factor <= max((len(mesh.ranks), *shape[p.dim :][:1])) for p in placements):
        return f"its placements {placements} shard into no parts, or into more than there are ranks or elements"
    return ""


def _cuts(mesh: Mesh, placements: tuple[Placement, ...]) -> int:
    """Returns an upper bound of the intervals that computing the shards of a tensor on a mesh visits."""
    return len(mesh.ranks) * math.prod(p.split_factor for p in placements if p.dim >= 0)


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
