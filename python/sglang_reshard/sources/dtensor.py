"""torch's DTensor, and verl's ShardSpec, as a mesh and placements."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.placements import Mesh, Placement


class Described(NamedTuple):
    """A tensor's global shape (elements), its mesh and placements, and this rank's local shard."""

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    local: torch.Tensor


def from_dtensor(name: str, tensor: DTensor, trainer_rank_of: dict[int, int]) -> Described:
    """A DTensor; nothing is gathered, the shard is the DTensor's own local tensor.

    trainer_rank_of  global rank -> trainer rank, of the ranks that take part in the update
    """
    mesh, placements = _on_root_mesh(tensor.device_mesh, tuple(tensor.placements))
    with torch.no_grad():  # with grad, to_local() makes an autograd node instead of handing out the shard
        local = tensor.to_local()
    return Described(
        tuple(tensor.shape),
        _mesh(name, mesh, trainer_rank_of),
        tuple(_placement(name, p) for p in placements),
        local,
    )


def from_shard_spec(name: str, local: torch.Tensor, spec: Any, trainer_rank_of: dict[int, int]) -> Described:
    """A flat local shard and verl's `ShardSpec`, read by its attributes full_shape, mesh and placements."""
    shape = tuple(spec.full_shape)
    if getattr(spec, "place", None) is not None:
        raise Unsupported(
            f"{name}: a ShardSpec with an explicit `place` is not carried yet; "
            "export this tensor with mesh and placements, or as a DTensor"
        )
    if spec.mesh is None:
        return plain(shape, local.view(shape), trainer_rank_of)
    mesh = _mesh(name, spec.mesh, trainer_rank_of)
    return Described(shape, mesh, tuple(_placement(name, p) for p in spec.placements), local)


def plain(shape: tuple[int, ...], local: torch.Tensor, trainer_rank_of: dict[int, int]) -> Described:
    """A tensor that every trainer rank holds whole."""
    ranks = tuple(sorted(trainer_rank_of.values()))
    return Described(shape, Mesh((len(ranks),), ranks), (Placement(),), local)


def _placement(name: str, placement: Any) -> Placement:
    # _StridedShard is no subclass of Shard in torch 2.11, and has no public name.
    if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
        return Placement(int(placement.dim), int(getattr(placement, "split_factor", 1)))
    if isinstance(placement, Replicate):
        return Placement()
    if isinstance(placement, Partial):
        raise Unsupported(
            f"{name} has the placement {placement}: its shards are summands, not parts. Reduce it first, "
            "for example with tensor.redistribute(placements=[Replicate()])"
        )
    raise Unsupported(f"{name} has the placement {placement}, which is none of Shard, _StridedShard and Replicate")


def _on_root_mesh(mesh: Any, placements: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The same tensor on the whole mesh: replicated along the dimensions that its own mesh leaves out.

    A tensor-parallel model under data parallelism has its DTensors on mesh["tp"], of which every
    data-parallel group has another; seen from the root all ranks describe the tensor alike.
    """
    root = mesh._get_root_mesh()
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    if root is mesh or names is None or all_names is None or not set(names) <= set(all_names):
        return mesh, placements
    own = dict(zip(names, placements, strict=True))
    return root, tuple(own.get(n, Replicate()) for n in all_names)


def _mesh(name: str, mesh: Any, trainer_rank_of: dict[int, int]) -> Mesh:
    global_ranks = mesh.mesh.flatten().tolist()
    ranks = tuple(trainer_rank_of.get(r, -1) for r in global_ranks)
    if all(r < 0 for r in ranks):
        raise Unsupported(
            f"{name} lives on a mesh of global ranks {global_ranks}, none of which takes part in the update "
            f"(global ranks {sorted(trainer_rank_of)} do); give the sender all ranks that hold weights"
        )
    return Mesh(tuple(mesh.mesh.shape), ranks)
