"""Converts DTensors, their device meshes and placements into layouts' meshes and placements."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import Mesh, MeshSharding, Placement


class DescribedTensor(NamedTuple):
    """A tensor's global shape (elements), its sharding over trainer ranks, and this rank's local tensor."""

    shape: tuple[int, ...]
    sharding: MeshSharding | ShardMap
    local: torch.Tensor


class MeshCache:
    """Converts device meshes to trainer ranks. Reading a mesh is expensive, so each (mesh, placements) is read once.

    trainer_rank_of  global rank -> trainer rank, for the ranks that participate in the update
    """

    def __init__(self, trainer_rank_of: dict[int, int]) -> None:
        self.trainer_rank_of = trainer_rank_of
        # Keyed by identity, as comparing device meshes is expensive too. The mesh is kept, so that its id stays unique.
        self._known: dict[tuple[int, tuple[Any, ...]], tuple[Any, MeshSharding]] = {}

    def sharding(self, name: str, mesh: Any, placements: tuple[Any, ...]) -> MeshSharding:
        """Returns the sharding on the root mesh. Raises Unsupported, naming the tensor."""
        key = id(mesh), placements
        if key not in self._known:
            self._known[key] = mesh, _mesh_sharding(name, mesh, placements, self.trainer_rank_of)
        return self._known[key][1]


def from_dtensor(name: str, tensor: DTensor, meshes: MeshCache) -> DescribedTensor:
    """Describes a DTensor by its own local tensor; nothing is gathered."""
    sharding = meshes.sharding(name, tensor.device_mesh, tuple(tensor.placements))
    with torch.no_grad():  # with grad, to_local() returns the output of an autograd node
        local = tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):  # after redistribute(async_op=True)
        local = local.wait()
    return DescribedTensor(tuple(tensor.shape), sharding, local)


def replicated(shape: tuple[int, ...], local: torch.Tensor, meshes: MeshCache) -> DescribedTensor:
    """Describes a tensor that every trainer rank holds in full."""
    ranks = tuple(sorted(meshes.trainer_rank_of.values()))
    return DescribedTensor(shape, MeshSharding(Mesh((len(ranks),), ranks), (Placement(),)), local)


def _placement(name: str, placement: Any) -> Placement:
    # _StridedShard is not a subclass of Shard in torch 2.11, and has no public name.
    if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
        return Placement(int(placement.dim), int(getattr(placement, "split_factor", 1)))
    if isinstance(placement, Replicate):
        return Placement()
    if isinstance(placement, Partial):
        raise Unsupported(
            f"{name} has the placement {placement}, whose shards have to be summed. Reduce it first, for example with "
            "tensor.redistribute(placements=[Replicate()])"
        )
    raise Unsupported(f"{name} has the placement {placement}; supported are Shard, _StridedShard and Replicate")


def _mesh_sharding(name: str, mesh: Any, placements: tuple[Any, ...], trainer_rank_of: dict[int, int]) -> MeshSharding:
    global_ranks, placements = _on_root_mesh(mesh, placements)
    ranks = tuple(trainer_rank_of.get(r, -1) for r in global_ranks.flatten().tolist())
    if all(r < 0 for r in ranks):
        raise Unsupported(
            f"{name} is on a mesh of global ranks {global_ranks.flatten().tolist()}, none of which participates in the "
            f"update (global ranks {sorted(trainer_rank_of)} do); create the sender on all ranks that hold weights"
        )
    return MeshSharding(Mesh(tuple(global_ranks.shape), ranks), tuple(_placement(name, p) for p in placements))


def _on_root_mesh(mesh: Any, placements: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
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
