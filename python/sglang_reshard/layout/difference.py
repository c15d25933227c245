"""How the layouts of two trainer ranks differ, for an error message."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from sglang_reshard.layout.shard_map import ShardMap
from sglang_reshard.layout.source_layout import SourceLayout


def first_difference(layout: SourceLayout, other: SourceLayout, other_rank: int) -> str:
    """How trainer rank `other_rank` differs from trainer rank 0, by the first tensor that does."""
    for a, b in zip(layout.tensors, other.tensors, strict=False):
        for what in ("name", "shape", "dtype"):
            if getattr(a, what) != getattr(b, what):
                return (
                    f"trainer ranks disagree at tensor {a.name}: its {what} is {getattr(a, what)} on trainer rank 0 "
                    f"and {getattr(b, what)} ({b.name}) on trainer rank {other_rank}; give all ranks the same "
                    "tensors in the same order"
                )
        ours, theirs = layout.distribution(a), other.distribution(b)
        if isinstance(ours, ShardMap) and isinstance(theirs, ShardMap):
            ours, theirs = _first_pieces_apart(ours, theirs)
        if ours != theirs:
            return (
                f"trainer ranks disagree at tensor {a.name}: trainer rank 0 has it as {ours}, "
                f"trainer rank {other_rank} as {theirs}"
            )
    return (
        f"trainer rank 0 has {len(layout.tensors)} tensors, trainer rank {other_rank} has {len(other.tensors)}; "
        "give all ranks the same tensors in the same order"
    )


def _first_pieces_apart(ours: ShardMap, theirs: ShardMap) -> tuple[Any, Any]:
    """The first piece that differs, instead of hundreds; None where there is none."""
    pairs = zip_longest(ours.pieces, theirs.pieces)
    return next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
