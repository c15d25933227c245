"""Finds NaN and infinity in the trainer's own tensors, before they are sent.

    if found := first_not_finite(model):          # on every trainer rank, with the same answer on all of them
        raise RuntimeError(found)
    sender.update(model, weight_version="42")

An update sends values as they are, and looks at none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang_reshard.sources import NamedTensors, describe
from sglang_reshard.sources.finite import not_finite
from sglang_reshard.trainer.collectives import gather, require_cpu_backend


def first_not_finite(
    named_tensors: NamedTensors | torch.nn.Module, group: dist.ProcessGroup | None = None
) -> str | None:
    """Returns a message about the first tensor with a NaN or infinity; None if none has. Collective over `group`.

    named_tensors  as `WeightSender.update` takes them. Ranks may list different ones
    group          process group of the trainer ranks, with a CPU backend; by default all ranks. Without
                   torch.distributed there is one rank

    Returns the same on every rank: what the first rank has found that has found anything. The message names the trainer
    rank and the tensor, and has the number of such elements on that rank and the global index of the first. Every
    element that a rank holds is read once, and nothing is copied but chunks of at most 2 MiB where no view will do.

    Raises Unsupported and Mismatch, on every rank, as `sources.describe` does on one.
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    rank, ranks = (0, (0,)) if group is None else (dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))

    def find() -> str:
        state = describe(named_tensors, trainer_rank=rank, global_ranks=ranks, partial=True)
        return not_finite(state.layout, state.shards, rank) or ""

    if group is None:
        return find() or None
    require_cpu_backend(group)
    return next(filter(None, gather(find, str, group)), None)
