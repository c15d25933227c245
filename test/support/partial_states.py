"""What trainer ranks that list only their own tensors have together, as in an update with partial=True."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.layout.union import union
from sglang_reshard.protocol.messages import decode, encode
from sglang_reshard.sources import SourceLayout, TrainerState, describe
from support.plans import assembled_states


def of_all_ranks(given: Sequence[Any]) -> list[TrainerState]:
    """Each rank's state in the layout of all, out of what each passes."""
    ranks = tuple(range(len(given)))
    own = [describe(given[rank], trainer_rank=rank, global_ranks=ranks, partial=True) for rank in ranks]
    return [state.within(_union([state.layout for state in own])) for state in own]


def of_this_rank(given: Any) -> TrainerState:
    """The same of this process, which is one rank of the world. Collective."""
    ranks = tuple(range(dist.get_world_size()))
    own = describe(given, trainer_rank=dist.get_rank(), global_ranks=ranks, partial=True)
    layouts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(layouts, encode(own.layout))
    return own.within(_union([decode(layout, SourceLayout) for layout in layouts]))


def _union(layouts: Sequence[SourceLayout]) -> SourceLayout:
    distinct = list(dict.fromkeys(layouts))
    return union(distinct, [distinct.index(layout) for layout in layouts])


def not_assembled(state: TrainerState, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that the shards of all ranks do not put together, every holder's compared. Collective."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, TrainerState(state.layout, tuple(shard.clone() for shard in state.shards), ()))
    assert all(other.layout == state.layout for other in states), "layouts differ between ranks"
    found = assembled_states(states)
    same = {name for name in found.keys() & expected.keys() if torch.equal(found[name], expected[name])}
    return sorted(found.keys() ^ expected.keys() | found.keys() - same)
