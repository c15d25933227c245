"""Combines what each trainer rank knows only of its own shards into the sharding of all checkpoint tensors.

Every rank determines its boxes of each checkpoint tensor. After one all-gather of that, metadata only, all ranks have
the same tensors, in the same order, with the same shard maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, ShardMap

T = TypeVar("T")


class AllGather(Protocol):
    """A collective over the trainer ranks. Returns every rank's message, in rank order. Metadata only."""

    def __call__(self, message: Any, kind: type[T]) -> list[T]: ...


class LocalBoxes(msgspec.Struct, frozen=True, array_like=True):
    """The boxes that a rank holds of a checkpoint tensor of `shape` (elements) and `dtype`.

    boxes  of the tensor, and where each starts in the rank's local tensor; empty if other ranks hold all of it
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


class RankShards(msgspec.Struct, frozen=True):
    """One trainer rank's message.

    rows   for each parameter in a list that all ranks have: the checkpoint tensors that this rank's shard of it belongs
           to, and the index of their boxes in `boxes`, which thousands of experts have in common
    tied   indices in `rows` of the parameters that the trainer keeps equal to others, as tied embeddings
    parts  the same as a row, for all parameters that are joined: other ranks have other experts, in other rows
    error  why this rank cannot take part; sent to all ranks, which would wait otherwise
    """

    rows: tuple[tuple[tuple[str, int], ...], ...] = ()
    boxes: tuple[LocalBoxes, ...] = ()
    tied: tuple[int, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    error: str = ""


class ShardedTensor(msgspec.Struct, frozen=True):
    """A checkpoint tensor's dtype and sharding."""

    dtype: str
    sharding: ExplicitSharding


def merge_shards(ranks: Sequence[RankShards]) -> dict[str, ShardedTensor]:
    """Returns all tensors by name, from the messages of all trainer ranks in rank order.

    Tied parameters that hold the same boxes of one tensor are replicas of it. Of a rank that has several, the first in
    the list is read.

    Raises Unsupported if a rank failed, if parameters that are not tied hold shards of one tensor, or if no rank holds
    some elements of a tensor, and Mismatch if ranks disagree; all name the tensor and the ranks.
    """
    for rank, shards in enumerate(ranks):
        if shards.error:
            raise Unsupported(f"trainer rank {rank}: {shards.error}")
        rows, first = len(shards.rows), len(ranks[0].rows)
        if rows != first:
            raise Mismatch(
                f"trainer rank {rank} lists {rows} parameters, but trainer rank 0 lists {first}; every trainer rank "
                "must list the same"
            )
    holders: dict[str, list[_Holder]] = {}
    for name, holder in _ordered(ranks):
        holders.setdefault(name, []).append(holder)
    known: dict[tuple[tuple[int, int], ...], ShardedTensor] = {}
    tensors = {}
    for name, of_name in holders.items():
        if len({holder.row for holder in of_name}) > 1:
            of_name = _replicas(name, of_name, ranks)
        key = tuple((holder.rank, holder.number) for holder in of_name)
        if key not in known:
            known[key] = _sharded_tensor(name, [(rank, ranks[rank].boxes[number]) for rank, number in key])
        tensors[name] = known[key]
    return tensors


class _Holder(NamedTuple):
    """A parameter's shard of a checkpoint tensor: its row, its trainer rank, and the index of its boxes there."""

    row: int
    rank: int
    number: int


def _ordered(ranks: Sequence[RankShards]) -> Iterator[tuple[str, _Holder]]:
    """Yields (name, holder) in an order that is the same on all ranks."""
    for row, of_ranks in enumerate(zip(*((*shards.rows, shards.parts) for shards in ranks), strict=True)):
        for rank, tensors in enumerate(of_ranks):
            for name, number in tensors:
                yield name, _Holder(row, rank, number)


def _replicas(name: str, holders: Sequence[_Holder], ranks: Sequence[RankShards]) -> list[_Holder]:
    """Returns one holder for each rank, out of those of several parameters."""
    boxes: dict[int, set[Box]] = {}
    for row, rank, number in holders:
        if row not in ranks[rank].tied:
            raise Unsupported(
                f"several parameters that are not tied hold {name}, on trainer rank {rank} among others. Only tensors "
                "whose parts are shards of one parameter are supported"
            )
        boxes.setdefault(row, set()).update(box for box, _ in ranks[rank].boxes[number].boxes)
    first, *others = boxes.values()
    if any(other != first for other in others):
        raise Unsupported(
            f"several tied parameters hold {name}, on trainer ranks {sorted({rank for _, rank, _ in holders})}, but "
            "are sharded differently; tied parameters must be sharded alike"
        )
    of_rank: dict[int, _Holder] = {}
    for holder in holders:
        if ranks[holder.rank].boxes[holder.number].boxes:
            of_rank.setdefault(holder.rank, holder)
    return list(of_rank.values())


def _sharded_tensor(name: str, by_rank: Sequence[tuple[int, LocalBoxes]]) -> ShardedTensor:
    first_rank, first = by_rank[0]
    for rank, local in by_rank[1:]:
        if (local.shape, local.dtype) != (first.shape, first.dtype):
            raise Mismatch(
                f"{name} is {first.dtype} {first.shape} on trainer rank {first_rank}, but {local.dtype} {local.shape} "
                f"on trainer rank {rank}"
            )
    shard_map = ShardMap.of((box, start, rank) for rank, local in by_rank for box, start in local.boxes)
    covered, expected = shard_map.covered_elements(), Box.whole(first.shape).numel
    if covered != expected:
        raise Unsupported(
            f"trainer ranks {[rank for rank, _ in by_rank]} hold only {covered} of the {expected} elements of {name}. "
            "The rest is padding, or is held by ranks outside the process group; create the process group over all "
            "ranks that hold weights"
        )
    return ShardedTensor(first.dtype, ExplicitSharding(first.shape, shard_map))
