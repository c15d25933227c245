"""A trainer's layout, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.regions import ITEM_BYTES
from sglang_reshard.layout.shard_map import ExplicitSharding, fault
from sglang_reshard.layout.source_layout import EXPLICIT, Mesh, Placement, SourceLayout, SourceTensor

MAX_TRAINER_RANKS = 1 << 17  # what a plan has bits for
MAX_DIMS = 16
MAX_TENSOR_BYTES = 1 << 60  # so that sums of a few are still 64-bit numbers
MAX_CUTS = 1 << 22  # intervals that all meshes cut all kinds of tensors into
MAX_STATED_PIECES = 1 << 18  # of one tensor
MAX_PIECES = 1 << 29  # of all tensors


def check_layout(layout: SourceLayout, trainer_ranks: int) -> None:
    """Raise Mismatch, naming the tensor, for a layout that cannot be one of so many trainer ranks.

    What is alike but for its name is checked once.
    """
    if not 1 <= layout.trainer_ranks == trainer_ranks <= MAX_TRAINER_RANKS:
        raise Mismatch(
            f"the source layout is of {layout.trainer_ranks} trainer ranks, the update of {trainer_ranks}; "
            f"they must be the same, and {MAX_TRAINER_RANKS:,} at the most"
        )
    kinds: dict[tuple[tuple[int, ...], str, int, int], list[str]] = {}
    for tensor in layout.tensors:
        kinds.setdefault((tensor.shape, tensor.dtype, tensor.mesh, tensor.placements), []).append(tensor.name)
    if twice := _first_repeated(tensor.name for tensor in layout.tensors):
        raise Mismatch(f"the source layout has the tensor {twice} twice; a name stands for one tensor")
    meshes = [_mesh_fault(mesh, trainer_ranks) for mesh in layout.meshes]
    cuts = pieces = 0
    for key, names in kinds.items():
        tensor = SourceTensor(names[0], *key)
        why = _fault(tensor, layout, meshes)
        if not why and tensor.mesh != EXPLICIT:
            cuts += _cuts(layout.meshes[tensor.mesh], layout.placements[tensor.placements])
            if cuts > MAX_CUTS:
                why = f"its trainer ranks cut it, and the tensors before it, into more than {MAX_CUTS:,} intervals"
        if not why:
            held = layout.shard_map(tensor)
            pieces += len(names) * len(held.pieces)
            if pieces > MAX_PIECES:
                why = f"it, and the tensors before it, have more than {MAX_PIECES:,} pieces"
            elif held.elements() != math.prod(tensor.shape):
                why = f"trainer ranks hold {held.elements()} of its {math.prod(tensor.shape)} elements"
        if why:
            raise Mismatch(
                f"the source layout cannot be right: {tensor.name}: {why}. Was it made by sglang-reshard's sender?"
            )


def _fault(tensor: SourceTensor, layout: SourceLayout, meshes: list[str]) -> str:
    """Why a tensor cannot be held as is said; empty if it can, as far as can be told without working it out."""
    shape = tensor.shape
    if tensor.dtype not in ITEM_BYTES:
        return f"the dtype {tensor.dtype!r} is not carried"
    if len(shape) > MAX_DIMS or any(n < 0 for n in shape):
        return f"the shape {shape} is none: a tensor has at most {MAX_DIMS} dimensions, none of them negative"
    if math.prod(max(1, n) for n in shape) * ITEM_BYTES[tensor.dtype] > MAX_TENSOR_BYTES:
        return f"the shape {shape} is of more than {MAX_TENSOR_BYTES:,} bytes"
    if tensor.mesh == EXPLICIT:
        if not 0 <= tensor.placements < len(layout.explicit):
            return f"the layout has no stated holdings number {tensor.placements}"
        stated = layout.explicit[tensor.placements]
        if len(stated.pieces) > MAX_STATED_PIECES:
            return f"it is held in {len(stated.pieces):,} pieces, more than {MAX_STATED_PIECES:,}"
        return fault(ExplicitSharding(shape, stated), layout.trainer_ranks) or ""
    if not 0 <= tensor.mesh < len(layout.meshes) or not 0 <= tensor.placements < len(layout.placements):
        return f"the layout has no mesh number {tensor.mesh}, or no placements number {tensor.placements}"
    mesh, placements = layout.meshes[tensor.mesh], layout.placements[tensor.placements]
    return meshes[tensor.mesh] or _placements_fault(placements, mesh, shape)


def _mesh_fault(mesh: Mesh, trainer_ranks: int) -> str:
    if not 1 <= len(mesh.shape) <= MAX_DIMS or any(n < 1 for n in mesh.shape):
        return f"its mesh of shape {mesh.shape} has no such dimensions"
    if math.prod(mesh.shape) != len(mesh.ranks):
        return f"its mesh of shape {mesh.shape} has {len(mesh.ranks)} ranks"
    members = [rank for rank in mesh.ranks if rank != -1]
    if any(not 0 <= rank < trainer_ranks for rank in members):
        return f"its mesh has trainer ranks that are not of this update, which has {trainer_ranks}"
    if len(set(members)) != len(members):
        return "its mesh has a trainer rank twice"
    return ""


def _placements_fault(placements: tuple[Placement, ...], mesh: Mesh, shape: tuple[int, ...]) -> str:
    dims = len(shape)
    if len(placements) != len(mesh.shape):
        return f"it has {len(placements)} placements on a mesh of {len(mesh.shape)} dimensions"
    if any(not -1 <= p.dim < dims for p in placements):
        return f"it has {dims} dimensions, and its placements {placements} split others"
    if any(not 1 <= p.split_factor <= max((len(mesh.ranks), *shape[p.dim :][:1])) for p in placements):
        return f"its placements {placements} split into no parts, or into more than there are ranks or elements"
    return ""


def _cuts(mesh: Mesh, placements: tuple[Placement, ...]) -> int:
    """A bound of the intervals that are looked at to say what all ranks of a mesh hold of a tensor."""
    return len(mesh.ranks) * math.prod(p.split_factor for p in placements if p.dim >= 0)


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
