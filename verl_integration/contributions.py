"""What each trainer rank alone knows of its shards, told to all and put together.

Every rank finds out which boxes of which checkpoint tensors it holds. One exchange of that, metadata only, and all
ranks have the same tensors, in the same order, with the same holdings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, ShardMap


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds of a checkpoint tensor of `shape` (elements) and `dtype`.

    boxes  of the tensor, and where each starts in the rank's local tensor; none where other ranks hold all of it
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


class Contribution(msgspec.Struct, frozen=True):
    """One trainer rank's.

    rows     for each row of a directory that all ranks have: the checkpoint tensors that this rank's parameter is
             part of, and the number of its share, which thousands of experts have in common
    refusal  why this rank cannot take part; all ranks must hear of it, or they would wait
    """

    rows: tuple[tuple[tuple[str, int], ...], ...] = ()
    shares: tuple[Share, ...] = ()
    refusal: str = ""


class Tensor(msgspec.Struct, frozen=True):
    """A checkpoint tensor: its dtype, and who holds what of it."""

    dtype: str
    held: ExplicitSharding


def put_together(contributions: Sequence[Contribution]) -> dict[str, Tensor]:
    """All tensors by name; `contributions` are those of all trainer ranks, in their order.

    Raises Unsupported when a rank refused, when rows have parts of the same tensor, or when elements of a tensor are
    nobody's, and Mismatch when ranks disagree; both name the tensor and the ranks.
    """
    for rank, contribution in enumerate(contributions):
        if contribution.refusal:
            raise Unsupported(f"trainer rank {rank}: {contribution.refusal}")
        rows, first = len(contribution.rows), len(contributions[0].rows)
        if rows != first:
            raise Mismatch(f"trainer rank {rank} lists {rows} parameters, and trainer rank 0 {first}")
    row_of: dict[str, int] = {}
    holders: dict[str, list[tuple[int, int]]] = {}
    for row, name, rank, number in _in_order(contributions):
        if row_of.setdefault(name, row) != row:
            raise Unsupported(
                f"{name} has parts in several parameters, on trainer rank {rank} among others; only a tensor "
                "whose parts are shards of one parameter is carried"
            )
        holders.setdefault(name, []).append((rank, number))
    alike: dict[tuple[tuple[int, int], ...], Tensor] = {}
    tensors = {}
    for name, numbers in holders.items():
        key = tuple(numbers)
        if key not in alike:
            alike[key] = _tensor(name, [(rank, contributions[rank].shares[number]) for rank, number in numbers])
        tensors[name] = alike[key]
    return tensors


def _in_order(contributions: Sequence[Contribution]) -> Iterator[tuple[int, str, int, int]]:
    """(row, name, trainer rank, number of its share), in an order that all ranks find alike."""
    for row, of_ranks in enumerate(zip(*(c.rows for c in contributions), strict=True)):
        for rank, tensors in enumerate(of_ranks):
            for name, number in tensors:
                yield row, name, rank, number


def _tensor(name: str, shares: Sequence[tuple[int, Share]]) -> Tensor:
    first_rank, first = shares[0]
    for rank, share in shares[1:]:
        if (share.shape, share.dtype) != (first.shape, first.dtype):
            raise Mismatch(
                f"{name} is {first.dtype} {first.shape} on trainer rank {first_rank} and {share.dtype} {share.shape} "
                f"on trainer rank {rank}"
            )
    holdings = ShardMap.of((box, at, rank) for rank, share in shares for box, at in share.boxes)
    held, wanted = holdings.elements(), Box.whole(first.shape).numel
    if held != wanted:
        raise Unsupported(
            f"{name} has {wanted} elements, of which trainer ranks {[rank for rank, _ in shares]} hold {held}; the "
            "rest is padding, or is with ranks that do not take part"
        )
    return Tensor(first.dtype, ExplicitSharding(first.shape, holdings))
