"""torch's DTensor as a mesh and placements."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import Mesh, MeshSharding, Placement


class DescribedTensor(NamedTuple):
    """A tensor's global shape (elements), its distribution over trainer ranks, and this rank's local tensor."""

    shape: tuple[int, ...]
    distribution: MeshSharding | ShardMap
    local: torch.Tensor


class Meshes:
    """Device meshes in trainer ranks. A mesh with its placements is read once, not once a tensor, which is dear.

    trainer_rank_of  global rank -> trainer rank, of the ranks that take part in the update
    """

    def __init__(self, trainer_rank_of: dict[int, int]) -> None:
        self.trainer_rank_of = trainer_rank_of
        # By identity: comparing device meshes is dear, too. Each is kept, so that its id stays its own.
        self._read: dict[tuple[int, tuple[Any, ...]], tuple[Any, MeshSharding]] = {}

    def read(self, name: str, mesh: Any, placements: tuple[Any, ...]) -> MeshSharding:
        """`mesh` and `placements`, seen from the root; raises Unsupported, naming the tensor."""
        key = id(mesh), placements
        if key not in self._read:
            self._read[key] = mesh, _meshed(name, mesh, placements, self.trainer_rank_of)
        return self._read[key][1]


def from_dtensor(name: str, tensor: DTensor, meshes: Meshes) -> DescribedTensor:
    """A DTensor; nothing is gathered, the shard is the DTensor's own local tensor."""
    distribution = meshes.read(name, tensor.device_mesh, tuple(tensor.placements))
    with torch.no_grad():  # with grad, to_local() makes an autograd node instead of handing out the shard
        local = tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):  # redistribute(async_op=True) hands out what is still on its way
        local = local.wait()
    return DescribedTensor(tuple(tensor.shape), distribution, local)


def plain(shape: tuple[int, ...], local: torch.Tensor, meshes: Meshes) -> DescribedTensor:
    """A tensor that every trainer rank holds whole."""
    ranks = tuple(sorted(meshes.trainer_rank_of.values()))
    return DescribedTensor(shape, MeshSharding(Mesh((len(ranks),), ranks), (Placement(),)), local)


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


def _meshed(name: str, mesh: Any, placements: tuple[Any, ...], trainer_rank_of: dict[int, int]) -> MeshSharding:
    global_ranks, placements = _on_root_mesh(mesh, placements)
    ranks = tuple(trainer_rank_of.get(r, -1) for r in global_ranks.flatten().tolist())
    if all(r < 0 for r in ranks):
        raise Unsupported(
            f"{name} lives on a mesh of global ranks {global_ranks.flatten().tolist()}, none of which takes part in "
            f"the update (global ranks {sorted(trainer_rank_of)} do); give the sender all ranks that hold weights"
        )
    return MeshSharding(Mesh(tuple(global_ranks.shape), ranks), tuple(_placement(name, p) for p in placements))


def _on_root_mesh(mesh: Any, placements: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Global ranks and placements of the same tensor on the whole mesh, replicated where its own mesh has siblings.

    A tensor-parallel model under data parallelism has its DTensors on mesh["tp"], of which every
    data-parallel group has another; seen from the root all ranks describe the tensor alike.
    """
    root = mesh._get_root_mesh()
    if root is mesh or root == mesh:
        return mesh.mesh, placements
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    if names is not None and all_names is not None and set(names) <= set(all_names):
        own = dict(zip(names, placements, strict=True))
        return root.mesh, tuple(own.get(n, Replicate()) for n in all_names)
    # Flattened and concatenated meshes have dimensions that the root knows no name of.
    siblings = mesh._layout.remap_to_tensor(mesh._rank_map) if hasattr(mesh, "_layout") else mesh.mesh.unsqueeze(0)
    if len(siblings) == 1:
        return mesh.mesh, placements
    return siblings, (Replicate(), *placements)
