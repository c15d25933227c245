"""Combines layouts of trainer ranks that list different tensors: pipeline stages, and experts of expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.shard_map import ShardMap, invalid_reason
from sglang_reshard.layout.source_layout import EXPLICIT, SourceLayout, SourceTensor

_Statement = tuple[int, tuple[int, ...], int, int]  # number of the layout, and shape, mesh and placements there


def union(layouts: Sequence[SourceLayout], layout_of_rank: Sequence[int]) -> SourceLayout:
    """Returns the layout of all tensors, in the order of the first trainer rank that lists each.

    layouts         the distinct ones
    layout_of_rank  number of each trainer rank's

    A tensor is held by the ranks that list it, each as its own layout states. Ranks that list it may state different
    shardings, as the first and the last stage do of a tied embedding.

    Raises Mismatch if ranks disagree about a tensor's shape or dtype, or hold parts of it that overlap; Unsupported if
    no rank holds some of its elements. Both name the tensor and ranks.
    """
    if len(layouts) == 1:
        (layout,) = layouts
        for tensor in {(t.shape, t.mesh, t.placements): t for t in layout.tensors}.values():
            _check_held(tensor, layout.shard_map(tensor), range(len(layout_of_rank)))
        return layout
    ranks_of = [[rank for rank, own in enumerate(layout_of_rank) if own == number] for number in range(len(layouts))]
    listed: dict[str, list[tuple[int, SourceTensor]]] = {}
    for number in dict.fromkeys(layout_of_rank):
        for tensor in layouts[number].tensors:
            listed.setdefault(tensor.name, []).append((number, tensor))
    explicit: dict[ShardMap, int] = {}
    known: dict[tuple[_Statement, ...], int] = {}
    tensors = []
    for name, statements in listed.items():
        (first, stated), *others = statements
        for number, other in others:
            if (other.shape, other.dtype) != (stated.shape, stated.dtype):
                raise Mismatch(
                    f"{name} is {stated.dtype} {stated.shape} on trainer rank {ranks_of[first][0]}, but {other.dtype} "
                    f"{other.shape} on trainer rank {ranks_of[number][0]}"
                )
        key = tuple((number, tensor.shape, tensor.mesh, tensor.placements) for number, tensor in statements)
        if key not in known:
            held = _held(name, {number: layouts[number].shard_map(tensor) for number, tensor in statements}, ranks_of)
            if reason := invalid_reason(stated.shape, held, len(layout_of_rank)):
                raise Mismatch(f"{name}: the trainer ranks that list it hold parts that do not go together: {reason}")
            _check_held(stated, held, [r for n, _ in statements for r in ranks_of[n]])
            known[key] = explicit.setdefault(held, len(explicit))
        tensors.append(SourceTensor(name, stated.shape, stated.dtype, EXPLICIT, known[key]))
    return SourceLayout(len(layout_of_rank), (), (), tuple(tensors), tuple(explicit))


def _check_held(tensor: SourceTensor, held: ShardMap, listing: Sequence[int]) -> None:
    if missing := tensor.spec.numel - held.covered_elements():
        raise Unsupported(
            f"{tensor.name}: trainer ranks {sorted(listing)} list it, and {missing} of its {tensor.spec.numel} "
            "elements are held by none of them. List it on all trainer ranks that hold shards of it"
        )


def _held(name: str, stated: Mapping[int, ShardMap], ranks_of: Sequence[Sequence[int]]) -> ShardMap:
    """Returns what each of the ranks holds that have one of the layouts, by their numbers."""
    strides = {shard_map.strides for shard_map in stated.values()}
    if len(strides) > 1:
        raise Unsupported(
            f"{name} is in flat buffers on some trainer ranks and not on others, for example on "
            f"{[ranks_of[n][0] for n in stated]}. Pass it in the same way on all of them"
        )
    listing = {number: set(ranks_of[number]) for number in stated}
    return ShardMap.of(
        (
            (shard.box, shard.local_start, rank)
            for number, shard_map in stated.items()
            for shard in shard_map.shards
            for rank in shard.ranks
            if rank in listing[number]
        ),
        strides.pop(),
    )
