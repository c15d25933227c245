"""What the ranks of a pair do: trainer ranks with real DTensors, engine ranks with real SGLang models."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from pair_models import weights
from pairs import Pair, Placing
from sglang_reshard.cli.plan.sglang_model import build_rank
from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.selftest.digests import digests
from support.live_memory import differing, fill_with_garbage
from support.nixl_env import use_nixl
from support.toy_serving import answered, receiver_of
from support.world import Requests, Trainer

UPDATES = (1, 2, 3)
TIMEOUT_S = 60.0


def train(trainer: Trainer, pair: Pair, specs: list[TensorSpec], folder: str, spoiled: bool) -> dict[str, Any]:
    """Two updates from the same memory, and one after all tensors were sharded anew, in another way.

    spoiled  one element of the last weights is another than the engine compares with
    """
    use_nixl()
    ranks = torch.arange(trainer.size)
    mesh = DeviceMesh(
        "cpu",
        (ranks.flip(0) if pair.mesh_reversed else ranks).view(pair.mesh),
        mesh_dim_names=("first", "second", "third")[: len(pair.mesh)],
    )
    sender = trainer.sender(bucket_bytes=pair.bucket_bytes, timeout_s=TIMEOUT_S, transport=pair.transport)
    state = sharded(pair.placings, weights(specs, 0, pair.trainer_dtype), mesh)
    phases, reports = [], []
    for version in UPDATES:
        new = weights(specs, version, pair.trainer_dtype)
        if spoiled and version == UPDATES[-1]:
            new[specs[-1].name].view(-1)[-1] += 1
        if version == UPDATES[-1]:
            state = sharded((*pair.placings[1:], pair.placings[0]), new, mesh)
        else:
            for name, tensor in sharded(pair.placings, new, mesh).items():  # in place, as an optimizer writes
                _local(state[name]).copy_(_local(tensor))
        report = sender.update(state.items(), weight_version=str(version))
        phases.append(sorted(report.seconds))
        reports.append(report.as_dict())
    return {"phases": phases, "reports": reports}


def sharded(placings: tuple[Placing, ...], whole: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    turns = itertools.cycle(placings)
    return {name: shard(tensor, mesh, next(turns)) for name, tensor in whole.items()}


def shard(whole: torch.Tensor, mesh: DeviceMesh, placing: Placing) -> torch.Tensor:
    """What this rank holds of a tensor; see `pairs.Placing`."""
    if not placing:
        return whole.clone()
    if "-" in placing:
        mesh = mesh[tuple(n for n, p in zip(mesh.mesh_dim_names or (), placing, strict=True) if p != "-")]
        placing = tuple(p for p in placing if p != "-")
    if not placing[0].startswith("X"):
        placements = [_placement(p, whole.ndim) for p in placing]
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    # torch's distribute_tensor cuts uneven sizes in another order than FSDP2 does, whose placement this is.
    inner = _placement(placing[1], whole.ndim)
    assert isinstance(inner, Shard)
    row, column = mesh.get_coordinate() or (0, 0)
    local = _chunk(_chunk(whole, mesh.size(1), column, inner.dim), mesh.size(0), row, inner.dim).clone()
    strided = _StridedShard(inner.dim, split_factor=mesh.size(1))
    return DTensor.from_local(local, mesh, [strided, inner], run_check=False, shape=whole.shape, stride=whole.stride())


def _placement(letters: str, ndim: int) -> Placement:
    return Replicate() if letters == "R" else Shard(int(letters[1]) % ndim)


def _chunk(tensor: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    """As torch.chunk, whose last parts may be missing: those are empty."""
    found = tensor.chunk(parts, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def serve(
    rank: int, size: int, requests: Requests, pair: Pair, specs: list[TensorSpec], folder: str, spoiled: bool
) -> dict[str, Any]:
    """Updates of this rank's model, then stock loads of the same weights; where they differ."""
    use_nixl()
    model = build_rank(folder, tp_size=size, tp_rank=rank, ep_size=pair.ep, dtype=pair.engine_dtype)
    receiver = receiver_of(model, rank, size)
    fill_with_garbage(model)
    signature = LiveSignature(model).current()
    updated = [digests(model) for _ in answered(receiver, requests)]
    same_addresses = LiveSignature(model).current() == signature
    fill_with_garbage(model)
    loaded = []
    for version in UPDATES:
        with torch.no_grad():
            model.load_weights(iter(weights(specs, version, pair.trainer_dtype).items()))  # type: ignore[operator]
        loaded.append(digests(model))
    return {
        "differing": [differing(a, b) for a, b in zip(updated, loaded, strict=True)],
        "changed": [len(differing(a, b)) for a, b in itertools.pairwise(updated)],
        "same_addresses": same_addresses,
    }
