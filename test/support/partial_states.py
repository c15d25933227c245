"""What trainer ranks that list only their own tensors have together, as in an update with partial=True."""

from collections.abc import Sequence
from typing import Any

from sglang_reshard.layout.union import union
from sglang_reshard.sources import TrainerState, describe


def of_all_ranks(given: Sequence[Any]) -> list[TrainerState]:
    """Each rank's state in the layout of all, out of what each passes."""
    ranks = tuple(range(len(given)))
    own = [describe(given[rank], trainer_rank=rank, global_ranks=ranks, partial=True) for rank in ranks]
    layouts = list(dict.fromkeys(state.layout for state in own))
    whole = union(layouts, [layouts.index(state.layout) for state in own])
    return [state.within(whole) for state in own]
