"""A trainer rank's named tensors, read into the Layout that all ranks share and this rank's local shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout import ITEM_BYTES, Box
from sglang_reshard.sources import dtensor
from sglang_reshard.sources.placements import Holdings, Layout, Mesh, Placement, SourceTensor, holdings


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The layout of all trainer ranks, and this rank's shards in the layout's order (elements in local order)."""

    layout: Layout
    shards: tuple[torch.Tensor, ...]


def describe(
    named_tensors: Iterable[tuple[str, torch.Tensor] | tuple[str, torch.Tensor, Any]],
    *,
    trainer_rank: int,
    global_ranks: tuple[int, ...],
) -> TrainerState:
    """Read a training state. Moves, gathers and copies nothing.

    named_tensors  (name, tensor), the tensor a DTensor or a plain tensor that every rank holds whole;
                   or (name, flat local shard, spec) with a spec like verl's ShardSpec
    global_ranks   the global rank of each trainer rank

    Raises Unsupported for placements, dtypes and kinds of tensors that cannot be carried, and Mismatch
    where a shard is not what its placements say; both name the tensor and the trainer rank.
    """
    trainer_rank_of = {g: t for t, g in enumerate(global_ranks)}
    meshes: dict[Mesh, int] = {}
    placements: dict[tuple[Placement, ...], int] = {}
    tensors, shards = [], []
    seen: set[str] = set()
    for name, tensor, *spec in named_tensors:
        if name in seen:
            raise Mismatch(f"trainer rank {trainer_rank}: the name {name} was given twice")
        seen.add(name)
        if spec and spec[0] is not None:
            described = dtensor.from_shard_spec(name, tensor, spec[0], trainer_rank_of)
        elif isinstance(tensor, DTensor):
            described = dtensor.from_dtensor(name, tensor, trainer_rank_of)
        else:
            described = dtensor.plain(tuple(tensor.shape), tensor, trainer_rank_of)
        _check_kind(name, described.local, trainer_rank)
        source = SourceTensor(
            name,
            described.shape,
            str(described.local.dtype).removeprefix("torch."),
            meshes.setdefault(described.mesh, len(meshes)),
            placements.setdefault(described.placements, len(placements)),
        )
        held = holdings(described.shape, described.mesh, described.placements)
        _check_complete(source, held)
        shards.append(_as_held(source, described.local.detach(), held, trainer_rank))
        tensors.append(source)
    if not tensors:
        raise Mismatch(f"trainer rank {trainer_rank}: there are no tensors to send")
    layout = Layout(len(global_ranks), tuple(meshes), tuple(placements), tuple(tensors))
    return TrainerState(layout, tuple(shards))


def _check_kind(name: str, local: torch.Tensor, trainer_rank: int) -> None:
    where = f"trainer rank {trainer_rank}: {name}"
    if local.layout is not torch.strided:
        raise Unsupported(f"{where} is a {local.layout} tensor; send a dense one")
    if local.device.type == "meta":
        raise Unsupported(f"{where} is on the meta device and has no data; materialise it first")
    if str(local.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise Unsupported(f"{where} has the dtype {local.dtype}, which is not carried; cast it first")


def _check_complete(source: SourceTensor, held: Holdings) -> None:
    covered = sum(box.numel for box in {piece.box for piece in held.pieces})
    if covered != source.spec.numel:
        raise Unsupported(
            f"{source.name}: the trainer ranks of this update hold {covered} of its {source.spec.numel} elements; "
            "give the sender all ranks of the tensor's mesh"
        )


def _as_held(source: SourceTensor, local: torch.Tensor, held: Holdings, trainer_rank: int) -> torch.Tensor:
    """The local tensor, in the shape that its placements say (verl hands it out flat)."""
    expected = held.local_shapes.get(trainer_rank, (0,))
    if tuple(local.shape) == expected:
        return local
    if local.numel() == Box.whole(expected).numel and (local.dim() == 1 or local.numel() == 0):
        return local.view(expected)
    raise Mismatch(
        f"trainer rank {trainer_rank}: {source.name} has a local shard of shape {tuple(local.shape)}, but its "
        f"placements over shape {source.shape} make it {expected}; was it resharded without its placements?"
    )
