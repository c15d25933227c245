"""Converts device meshes and placements of DTensors into those of a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.source_layout import Mesh, MeshSharding, Placement


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Returns a DTensor's own local tensor; nothing is gathered."""
    local = tensor._local_tensor  # with grad, to_local() returns the output of an autograd node
    # After redistribute(async_op=True) it may still be in transit.
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def mesh_sharding(where: str, mesh: Any, placements: tuple[Any, ...], trainer_rank_of: dict[int, int]) -> MeshSharding:
    """Returns the sharding over the root mesh. Raises Unsupported, starting with `where`.

    trainer_rank_of  global rank -> trainer rank, for the ranks that participate in the update
    """
    global_ranks, placements = on_root_mesh(mesh, placements)
    ranks = tuple(trainer_rank_of.get(r, -1) for r in global_ranks.flatten().tolist())
    if all(r < 0 for r in ranks):
        raise Unsupported(
            f"{where} is on a mesh of global ranks {global_ranks.flatten().tolist()}, none of which participates in "
            f"the update (global ranks {sorted(trainer_rank_of)} do); create the sender on all ranks that hold weights"
        )
    return MeshSharding(Mesh(tuple(global_ranks.shape), ranks), tuple(_placement(where, p) for p in placements))


def _placement(where: str, placement: Any) -> Placement:
    # _StridedShard is not a subclass of Shard in torch 2.11, and has no public name.
    if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
        return Placement(int(placement.dim), int(getattr(placement, "split_factor", 1)))
    if isinstance(placement, Replicate):
        return Placement()
    if isinstance(placement, Partial):
        raise Unsupported(
            f"{where} has the placement {placement}, whose shards have to be summed. Reduce it first, for example with "
            "tensor.redistribute(placements=[Replicate()])"
        )
    raise Unsupported(f"{where} has the placement {placement}; supported are Shard, _StridedShard and Replicate")


def on_root_mesh(mesh: Any, placements: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Returns global ranks and placements of the tensor on the root mesh, replicated over sibling submeshes.

    Tensor parallelism under data parallelism has its DTensors on mesh["tp"], of which every data-parallel group has
    another one. On the root mesh all ranks describe the tensor alike.
    """
    root = mesh._get_root_mesh()
    if root is mesh or root == mesh:
        return mesh.mesh, placements
    names, root_names = mesh.mesh_dim_names, root.mesh_dim_names
    if names is not None and root_names is not None and set(names) <= set(root_names):
        own = dict(zip(names, placements, strict=True))
        return root.mesh, tuple(own.get(n, Replicate()) for n in root_names)
    # Dimensions of flattened and concatenated meshes are not among the root's.
    siblings = mesh._layout.remap_to_tensor(mesh._rank_map) if hasattr(mesh, "_layout") else mesh.mesh.unsqueeze(0)
    if len(siblings) == 1:
        return mesh.mesh, placements
    return siblings, (Replicate(), *placements)
