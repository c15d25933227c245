"""The toy model as trainers hold it whose local tensors are not the checkpoint's: stacked, or fused as by Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, FusedSlice, FusedTensor, ShardMap, blocks
from support.toy import HEAD_DIM, HEADS, KV_HEADS, VOCAB

STACKED = ("gate.weight", "up.weight", "down.weight")
Rows = tuple[str, int, int]  # of a tensor: from which row on, and how many; without a name they are padding


def stacked(whole: dict[str, torch.Tensor]) -> tuple[torch.Tensor, FusedTensor]:
    """Gate, up and down as one tensor [3, inner, hidden], in which down lies transposed, and what it stands for."""
    gate, up, down = (whole[name] for name in STACKED)
    shape = (1, *gate.shape)
    parts = [
        (name, FusedSlice((i, 0, 0), (i + 1, *shape[1:]), (2, 1) if name == "down.weight" else (1, 2)))
        for i, name in enumerate(STACKED)
    ]
    return torch.stack([gate, up, down.t()]), FusedTensor(tuple(parts))


def fused(whole: dict[str, torch.Tensor], tp: int, ranks: int, rank: int) -> Iterator[tuple[Any, ...]]:
    """What a trainer rank of `ranks` gives: tensor parallelism over `tp` of them, and replicas of that."""
    hidden = whole["norm.weight"].numel()
    for contents in zip(*(_local_tensors(hidden, tp, t) for t in range(tp)), strict=True):
        held: dict[str, list[Any]] = {}
        for r in range(ranks):
            at = 0
            for name, first, rows in contents[r % tp]:
                held.setdefault(name, []).append((Box((first, 0), (first + rows, hidden)), (at, 0), r))
                at += rows
        local = torch.cat([_values(whole, hidden, *rows) for rows in contents[rank % tp]])
        held.pop("", None)
        for name, pieces in held.items():
            yield name, local, ExplicitSharding(tuple(whole[name].shape), ShardMap.of(pieces))
    part = 3 * hidden // tp
    columns = [Box((0, r % tp * part), (hidden, (r % tp + 1) * part)) for r in range(ranks)]
    down = whole["down.weight"]
    yield "down.weight", down[columns[rank].slices()].flatten(), blocks(down.shape, columns)
    yield "norm.weight", whole["norm.weight"]


def _local_tensors(hidden: int, tp: int, t: int) -> Iterator[list[Rows]]:
    """Of tensor-parallel rank `t`: queries, keys and values by groups, gate and up, the padded vocabulary."""
    queries, groups = HEADS // KV_HEADS * HEAD_DIM, KV_HEADS // tp
    of_group = {"q.weight": queries, "k.weight": HEAD_DIM, "v.weight": HEAD_DIM}
    own = range(t * groups, (t + 1) * groups)
    yield [(name, g * rows, rows) for g in own for name, rows in of_group.items()]
    part = 3 * hidden // tp
    yield [("gate.weight", t * part, part), ("up.weight", t * part, part)]
    vocabulary = -(-VOCAB // tp)
    real = min(vocabulary, VOCAB - t * vocabulary)
    yield [("embed.weight", t * vocabulary, real), ("", 0, vocabulary - real + 2)]


def _values(whole: dict[str, torch.Tensor], hidden: int, name: str, first: int, rows: int) -> torch.Tensor:
    if not name:
        return torch.full((rows, hidden), torch.nan, dtype=whole["norm.weight"].dtype)
    return whole[name][first : first + rows]
