"""Validates what one process sends to another about updates, tensors and memory, before it is used.

A message is authenticated, but its content may be wrong: a broken trainer must not crash the engine that reads its
memory, nor the other way round. Decoding checks each field by itself, and bounds the size of a manifest. After these
checks every index is within its table, every view within its memory, and all work is bounded:

    check_layout        engine ranks, before a trainer's layout is used
    check_handles       engine ranks, before a trainer rank's memory is mapped
    check_request       an engine's tokenizer manager, and each engine rank, before an update begins
    check_pull_request  an engine's HTTP process, before it asks anybody

The route checks the messages between its own ends. All raise Mismatch. Manifests are checked when they are new, not in
every update.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from typing import get_args

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.decoders import msgpack_decoder
from sglang_reshard.layout.regions import ITEM_BYTES
from sglang_reshard.layout.shard_map import invalid_reason
from sglang_reshard.layout.source_layout import EXPLICIT, Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.memory.gpu_memory import MARK_WORDS, MAX_STORAGE_BYTES
from sglang_reshard.memory.mapping import Handles, ShmStorage
from sglang_reshard.nearest import not_one_of
from sglang_reshard.protocol.messages import (
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    DistributedUpdateWeightsReq,
    LoadSnapshotReq,
    PullWeightsReq,
    Verify,
    encode,
)
from sglang_reshard.route_table import FROM_FILES, ROUTES

MAX_TRAINER_RANKS = 1 << 17  # what a plan has bits for
MAX_DIMS = 16
MAX_TENSOR_BYTES = 1 << 60  # so that sums of a few are still 64-bit numbers
MAX_CUTS = 1 << 22  # intervals, over all kinds of tensors
MAX_EXPLICIT_SHARDS = 1 << 18  # of one tensor
MAX_SHARDS = 1 << 29  # of all tensors
MAX_UPDATE = "SGLANG_RESHARD_MAX_UPDATE_S"  # of an engine: seconds that a whole update may take there
_DEFAULT_MAX_UPDATE_S = 3600.0


def check_transport(name: str, *, of_request: bool = False) -> None:
    """Raises Mismatch for the name of a transport that does not exist, or that no user can ask for."""
    if name != "auto" and name not in ROUTES and not (of_request and name in FROM_FILES):
        raise Mismatch(not_one_of(f"transport {name[:80]!r}", name, ("auto", *ROUTES)))


def max_update_s() -> float:
    """Returns this engine's limit of an update's whole time. Raises Mismatch if it is set to anything but seconds."""
    given = os.environ.get(MAX_UPDATE)
    if given is None:
        return _DEFAULT_MAX_UPDATE_S
    with contextlib.suppress(ValueError):
        if MIN_TIMEOUT_S <= float(given) <= MAX_TIMEOUT_S:
            return float(given)
    raise Mismatch(
        f"{MAX_UPDATE}={given[:80]!r} in this engine's environment is not a number of seconds; correct or unset it"
    )


def check_limit(request: DistributedUpdateWeightsReq | LoadSnapshotReq) -> None:
    """Raises Mismatch for a request that may take longer than this engine's limit."""
    if request.timeout_s > (limit_s := max_update_s()):
        raise Mismatch(
            f"timeout_s={request.timeout_s} exceeds this engine's limit of {limit_s:g} seconds for a whole update. "
            f"Pass a shorter timeout_s to the sender, or start the engine with a higher {MAX_UPDATE}"
        )


def check_request(request: DistributedUpdateWeightsReq) -> None:
    """Raises Mismatch for a request that no sender makes, or that may take longer than this engine's limit."""
    cure = "Send it with sglang_reshard.WeightSender"
    check_limit(request)
    check_transport(request.transport, of_request=True)
    _check_fields(request, "update", cure)
    ranks, devices, offers = len(request.trainer_hosts), len(request.trainer_devices), len(request.offers)
    equal = len(request.handles) == ranks and {devices, offers} <= {0, ranks}
    if not 1 <= ranks <= MAX_TRAINER_RANKS or not equal:
        raise Mismatch(
            f"invalid update request: it has {ranks} trainer hosts, {len(request.handles)} memory handles, {devices} "
            f"trainer devices and {offers} offers; all must have one entry per trainer rank, from 1 to "
            f"{MAX_TRAINER_RANKS:,}. {cure}"
        )


def check_pull_request(request: PullWeightsReq) -> None:
    """Raises Mismatch for a request whose values no server can use. The URL is not requested."""
    cure = "Send it with sglang_reshard.RemoteEngine or `sglang-reshard pull`"
    check_transport(request.transport)
    if request.verify not in get_args(Verify):
        raise Mismatch(not_one_of(f"verify={request.verify!r}", request.verify, get_args(Verify)))
    _check_fields(request, "pull", cure)
    if any(not (key.isascii() and key.isprintable()) for key in (request.api_key, request.admin_api_key)):
        raise Mismatch(f"invalid pull request: a key has characters that an HTTP header cannot carry. {cure}")


def _check_fields(request: DistributedUpdateWeightsReq | PullWeightsReq, kind: str, cure: str) -> None:
    """Checks the fields of a request that this process may have made itself, as decoding does."""
    try:
        msgpack_decoder(type(request)).decode(encode(request))
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError) as error:
        raise Mismatch(f"invalid {kind} request: {error}. {cure}") from error


# -- manifests


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
    count = Counter(tensor.name for tensor in layout.tensors)
    if twice := next((name for name, times in count.items() if times > 1), ""):
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
        return invalid_reason(shape, stated, layout.trainer_ranks)
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


def check_handles(handles: Handles, layout: SourceLayout, trainer_rank: int) -> None:
    """Raises Mismatch, naming trainer rank and tensor, unless all shards of the rank lie within its storages.

    The storages themselves are checked when they are mapped. `layout` was checked by `check_layout`.
    """
    invalid = f"invalid memory handles of trainer rank {trainer_rank}"
    if handles.reason:
        if handles.storages or handles.shards or handles.marks:
            raise Mismatch(
                f"{invalid}: it gives a reason why it has no handles, {handles.reason[:80]!r}, but sends "
                f"{len(handles.storages)} storages and {len(handles.shards)} shards"
            )
        return
    if len(handles.shards) != len(layout.tensors):
        raise Mismatch(
            f"{invalid}: it describes {len(handles.shards)} shards, but its layout has {len(layout.tensors)} tensors"
        )
    for number, mark in enumerate(handles.marks):
        if mark.offset + MARK_WORDS * 8 > mark.allocation.nbytes:
            raise Mismatch(f"{invalid}: mark {number} is at byte {mark.offset:,} of {mark.allocation.nbytes:,}")
    sizes = [storage.nbytes for storage in handles.storages]
    total = sum(storage.nbytes for storage in handles.storages if isinstance(storage, ShmStorage))
    if total > MAX_STORAGE_BYTES:
        raise Mismatch(f"{invalid}: {total:,} bytes exceed the address space")
    shapes = layout.min_local_shapes(trainer_rank)
    for tensor, view, shape in zip(layout.tensors, handles.shards, shapes, strict=True):
        why = ""
        if not (-1 if shape is None else 0) <= view.storage < len(sizes):
            why = f"its shape is {shape}, and there are {len(sizes)} storages"
        elif shape is not None and len(view.strides) != len(shape):
            why = f"the strides do not fit a shard of {shape}"
        elif shape is not None:
            reach = sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))
            end = (view.offset + 1 + reach) * ITEM_BYTES[tensor.dtype]
            if end > sizes[view.storage]:
                why = f"a shard of {shape} reaches to byte {end:,} of {sizes[view.storage]:,}"
        if why:
            raise Mismatch(
                f"trainer rank {trainer_rank}: the shard of {tensor.name} is invalid at offset {view.offset} with "
                f"strides {view.strides} of storage number {view.storage}: {why}. Was the tensor replaced? Start a new "
                "session"
            )
