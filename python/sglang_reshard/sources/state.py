"""A trainer rank's named tensors, read into the Layout that all ranks share and this rank's local shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout import ITEM_BYTES, Box
from sglang_reshard.sources import dtensor
from sglang_reshard.sources.fsdp import ShardedParameters, named_shards
from sglang_reshard.sources.placements import Holdings, Layout, Mesh, Placement, SourceTensor, holdings

NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor] | tuple[str, torch.Tensor, Any]]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The layout of all trainer ranks, and this rank's shards in the layout's order (elements in local order)."""

    layout: Layout
    shards: tuple[torch.Tensor, ...]


def describe(
    named_tensors: NamedTensors | torch.nn.Module,
    *,
    trainer_rank: int,
    global_ranks: tuple[int, ...],
) -> TrainerState:
    """Read a training state. Moves, gathers and copies nothing.

    named_tensors  (name, tensor), the tensor a DTensor or a plain tensor that every rank holds whole;
                   or (name, flat local shard, spec) with a spec like verl's ShardSpec. A module stands
                   for its `named_shards`
    global_ranks   the global rank of each trainer rank

    The same tensor may be given under several names (`aliases` tells). FSDP2's unsharded copies, which
    `named_parameters` yields between a forward and its backward, stand for the sharded parameters; see
    `sglang_reshard.sources.fsdp`.

    Raises Unsupported for placements, dtypes and kinds of tensors that cannot be carried, and Mismatch
    where a shard is not what its placements say; both name the tensor and the trainer rank.
    """
    device_meshes = dtensor.Meshes({g: t for t, g in enumerate(global_ranks)})
    meshes: dict[Mesh, int] = {}
    placements: dict[tuple[Placement, ...], int] = {}
    tensors, shards = [], []
    seen: set[str] = set()
    sharded: ShardedParameters | None = None
    for name, given, *spec in listed(named_tensors, trainer_rank):
        where = f"trainer rank {trainer_rank}: {name}"
        if name in seen:
            raise Mismatch(f"trainer rank {trainer_rank}: the name {name} was given twice")
        seen.add(name)
        if not isinstance(given, torch.Tensor):
            raise Unsupported(f"{where} is no tensor but of the type {type(given).__name__}; leave it out")
        # Looked up late: a generator of named tensors may run a forward before its first.
        sharded = sharded or ShardedParameters.of_this_process()
        tensor = given if spec and spec[0] is not None else sharded.of(where, given)
        if spec and spec[0] is not None:
            described = dtensor.from_shard_spec(where, tensor, spec[0], device_meshes)
        elif isinstance(tensor, DTensor):
            described = dtensor.from_dtensor(where, tensor, device_meshes)
        else:
            described = dtensor.plain(tuple(tensor.shape), tensor, device_meshes)
        _check_kind(where, described.local)
        source = SourceTensor(
            name,
            described.shape,
            # A rank outside the tensor's mesh has an empty local tensor of any dtype.
            str(tensor.dtype).removeprefix("torch."),
            meshes.setdefault(described.mesh, len(meshes)),
            placements.setdefault(described.placements, len(placements)),
        )
        held = holdings(described.shape, described.mesh, described.placements)
        _check_complete(where, source, held)
        shards.append(_as_held(source, described.local.detach(), held, trainer_rank))
        tensors.append(source)
    if not tensors:
        raise Mismatch(f"trainer rank {trainer_rank}: there are no tensors to send")
    layout = Layout(len(global_ranks), tuple(meshes), tuple(placements), tuple(tensors))
    return TrainerState(layout, tuple(shards))


def listed(named_tensors: NamedTensors | torch.nn.Module, trainer_rank: int) -> list[tuple[Any, ...]]:
    """What is given, as a list; a module's `named_shards`. Raises Unsupported as those do."""
    if not isinstance(named_tensors, torch.nn.Module):
        return list(named_tensors)
    try:
        return list(named_shards(named_tensors))
    except Unsupported as error:
        raise Unsupported(f"trainer rank {trainer_rank}: {error}") from error


def _check_kind(where: str, local: torch.Tensor) -> None:
    if local.layout is not torch.strided:
        raise Unsupported(f"{where} is a {local.layout} tensor; send a dense one")
    if local.device.type == "meta":
        raise Unsupported(f"{where} is on the meta device and has no data; materialise it first")
    if is_traceable_wrapper_subclass(local):
        raise Unsupported(f"{where} is a {type(local).__name__}, which wraps other tensors; send those, or a plain one")
    if str(local.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise Unsupported(f"{where} has the dtype {local.dtype}, which is not carried; cast it first")
    if local.is_neg():
        raise Unsupported(f"{where} is a negated view, whose memory has the opposite signs; send its resolve_neg()")
    if local.numel() and not local.untyped_storage().nbytes():
        raise Unsupported(f"{where} has no memory any more: its storage was freed; send what is registered now")


def _check_complete(where: str, source: SourceTensor, held: Holdings) -> None:
    covered = sum(box.numel for box in {piece.box for piece in held.pieces})
    if covered != source.spec.numel:
        raise Unsupported(
            f"{where}: the trainer ranks of this update hold {covered} of its {source.spec.numel} elements; "
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
