"""Plans what one target rank reads: the boxes of its own shards, from the ranks that hold them in the source's layout.

A target rank plans from its own layout alone. So ranks may keep a tensor in different shardings: a generation layout of
TP=2 on some ranks and of TP=4 on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import LocalRegion, Region
from sglang_reshard.memory.overlap import Written, written_once
from sglang_reshard.plan import RankLocation, ReadPlan, TensorIndex, plan_reads
from sglang_reshard.shown_names import some_names
from sglang_reshard.sources import SourceTensor, TrainerState
from sglang_reshard.trace.program import Copy, Program, check_cast


class Demand(msgspec.Struct, frozen=True):
    """The needs of one rank, as all ranks are told.

    listed         bits: bit i is set if the rank's target has tensor i of the source's layout
    sent_bytes     rank -> bytes that it has to send to this one
    request_bytes  rank -> bytes of the packed `SendRequest` for it
    """

    listed: bytes
    sent_bytes: dict[int, int]
    request_bytes: dict[int, int]


def target_program(
    index: TensorIndex,
    target: TrainerState | None,
    rank: int,
    *,
    strict: bool,
    tied: Callable[[str, str], bool] = lambda a, b: False,
) -> Program:
    """Returns the copies of the source's boxes into this rank's shards of the target, which are the `targets`.

    index   of the source's layout
    target  None if this rank has nothing of it
    strict  raise Mismatch for tensors that the source lacks; otherwise they are left out
    tied    returns whether two names are one tensor in the source

    Raises Mismatch for shapes that differ and for targets that share memory, and Unsupported for casts that do not
    preserve what values mean.
    """
    if target is None:
        return Program((), {})
    copies: list[Copy] = []
    targets: dict[str, torch.Tensor] = {}
    lacking = []
    own = TensorIndex.of(target.layout)
    places = [list(_places(own, number, rank)) for number in range(len(own.classes))]
    for number, (tensor, local) in enumerate(zip(target.layout.tensors, target.shards, strict=True)):
        source = index.index_of.get(tensor.name)
        if source is None:
            lacking.append(tensor.name)
            continue
        _check_alike(index.layout.tensors[source], tensor, rank)
        targets[tensor.name] = local
        for region, place in places[own.class_of[number]]:
            offset, strides = place.memory(local.stride())
            copies.append(Copy(tensor.name, region, tensor.name, offset, strides))
    if strict and lacking:
        raise Mismatch(
            f"trainer rank {rank}: the target has {len(lacking)} tensors that are in no trainer rank's source: "
            f"{some_names(lacking)}. Pass them in the source as well, or pass strict=False to leave them unchanged"
        )
    written = [Written.within(c.target, targets[c.target], c.offset, c.region.count, c.strides) for c in copies]
    kept = written_once(written, tied, f"trainer rank {rank}: ")
    return Program(tuple(copies[number] for number in kept), targets)


def _places(own: TensorIndex, number: int, rank: int) -> Iterator[tuple[Region, LocalRegion]]:
    """Yields each box that the rank holds of a tensor of a class, and where it is in the local tensor."""
    shard_map = own.classes[number].shard_map
    for shard in shard_map.shards_of(rank):
        region = Region.of(shard.box)
        yield region, shard_map.to_local(shard, region)


def _check_alike(source: SourceTensor, target: SourceTensor, rank: int) -> None:
    if source.shape != target.shape:
        raise Mismatch(
            f"trainer rank {rank}: {target.name} has shape {target.shape} in the target and {source.shape} in the "
            "source; both must be equal"
        )
    try:
        check_cast(source.name, getattr(torch, source.dtype), target.name, getattr(torch, target.dtype))
    except Unsupported as error:
        raise Unsupported(
            f"trainer rank {rank}: {target.name} is {target.dtype} in the target and {source.dtype} in the source, and "
            "a cast would not preserve its values. Convert it on one side"
        ) from error


def plan_target_reads(index: TensorIndex, program: Program, rank: int, hosts: Sequence[str]) -> ReadPlan:
    """Plans from which rank each element is taken: this rank itself, else its own host, evenly where there are several.

    hosts  identity of each rank's host
    """
    others = frozenset(range(len(hosts))) - {rank}
    return plan_reads(
        index, program.copies, RankLocation(rank, len(hosts), hosts[rank], tuple(hosts), unreadable=others)
    )


def listed_bits(index: TensorIndex, program: Program) -> bytes:
    """Returns `Demand.listed`."""
    listed = np.zeros(len(index.layout.tensors), bool)
    listed[[index.index_of[name] for name in program.targets]] = True
    return np.packbits(listed).tobytes()


def check_all_listed(index: TensorIndex, demands: Sequence[Demand]) -> None:
    """Raises Mismatch, naming them, for tensors of the source that no rank's target has."""
    rows = [np.frombuffer(demand.listed, np.uint8) for demand in demands]
    listed = np.unpackbits(np.bitwise_or.reduce(rows), count=len(index.layout.tensors)).astype(bool)
    if lacking := [index.layout.tensors[i].name for i in np.flatnonzero(~listed).tolist()]:
        raise Mismatch(
            f"the source has {len(lacking)} tensors that are in no trainer rank's target: {some_names(lacking)}. Pass "
            "them in the target as well, or pass strict=False to leave them out"
        )


def sent_matrix(demands: Sequence[Demand]) -> np.ndarray:
    """Returns the bytes that each rank sends each rank, [source ranks, target ranks]."""
    found = np.zeros((len(demands), len(demands)), np.int64)
    for rank, demand in enumerate(demands):
        for peer, nbytes in demand.sent_bytes.items():
            found[peer, rank] = nbytes
    return found
