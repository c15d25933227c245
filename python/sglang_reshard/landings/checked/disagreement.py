"""Finds tensors whose values differ between trainer ranks, where their layout says that they are the same.

A name that means another tensor on each trainer rank looks like a replica: the experts of expert parallelism by local
indices, or the layers of a pipeline. Nobody compares replicas in an update. After one that has failed the trainer ranks
do, so that the error names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.errors import EngineRefused, ReshardError
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.messages import CHANGED_UNDER_WAY
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.layout.source_layout import SourceLayout, SourceTensor
from sglang_reshard.shown_names import some_names

Exchange = Callable[[bytes], Sequence[bytes]]  # returns, on every trainer rank, what each of them has passed


class _Replica(NamedTuple):
    number: int
    tensor: SourceTensor
    box: Box
    ranks: tuple[int, ...]


def explained(
    errors: Mapping[int, ReshardError],
    layout: SourceLayout,
    shards: Callable[[], Sequence[torch.Tensor]],
    trainer_rank: int,
    update: int,
    exchange: Exchange,
    partial: bool,
) -> dict[int, ReshardError]:
    """Returns the errors of engines, with the disagreement of trainer ranks where that may be the cause. Collective.

    They compare all elements if an engine has received other weights than the trainer has, and a sample if it has
    refused weights although each trainer rank has listed its own (`partial`).
    """
    changed = any(CHANGED_UNDER_WAY in str(error) for error in errors.values())
    if not changed and not (partial and any(type(error) is EngineRefused for error in errors.values())):
        return dict(errors)
    selection = Selection.full() if changed else Selection.sample(update)
    why = disagreement(layout, shards, trainer_rank, selection, exchange)
    return {engine: _because(error, why) if why else error for engine, error in errors.items()}


def _because(error: ReshardError, why: str) -> ReshardError:
    """Returns the error with the reason in it, in place of other suspicions."""
    message = str(error)
    told = message.replace(CHANGED_UNDER_WAY, why)
    return type(error)(told if told != message else f"{message.removesuffix('.')}. {why}")


def disagreement(
    layout: SourceLayout,
    shards: Callable[[], Sequence[torch.Tensor]],
    trainer_rank: int,
    selection: Selection,
    exchange: Exchange,
) -> str:
    """Names trainer ranks that hold different values, and their tensors; empty if there are none. Collective.

    Every element of `selection` that another rank holds, too, is read once.
    """
    replicas = list(_replicas(layout))
    try:
        own = _own_sums(layout, shards(), trainer_rank, selection) if replicas else b""
    except Exception:  # the update's own error counts
        own = b""
    try:
        sums = [iter(np.frombuffer(told, "<u8").tolist()) for told in exchange(own)] if replicas else []
    except ReshardError:
        return ""
    found: dict[tuple[int, ...], list[str]] = {}
    for replica in replicas:
        values = {next(sums[rank], None) for rank in replica.ranks} - {None}
        if len(values) > 1:
            found.setdefault(replica.ranks, []).append(replica.tensor.name)
    for ranks, of_ranks in found.items():
        names = some_names(list(dict.fromkeys(of_ranks)))
        return (
            f"Trainer ranks {list(ranks)} hold different values of {names}: a name must stand for one tensor on all of "
            "them. If these are the experts or layers of each rank, under local indices, pass their global names "
            "(rename= or as names); if each rank holds a part, pass an ExplicitSharding; else make replicas equal"
        )
    return ""


def _own_sums(layout: SourceLayout, shards: Sequence[torch.Tensor], trainer_rank: int, selection: Selection) -> bytes:
    """Returns a checksum of each replica that this rank holds, in their order: little-endian uint64."""
    batch, rows = RegionBatch(), 0
    for number, tensor, box, ranks in _replicas(layout):
        if trainer_rank in ranks:
            held = layout.shard_map(tensor)
            shard = next(s for s in held.shards_of(trainer_rank) if s.box == box)
            region = Region.of(box)
            spec = RegionSpec.of(tensor.shape, region, getattr(torch, tensor.dtype), cast=False)
            batch.add(spec, held.to_local(shard, region).view(shards[number]), rows)
            rows += 1
    return batch.checksums(rows, selection).astype("<u8").tobytes()


def _replicas(layout: SourceLayout) -> Iterator[_Replica]:
    """Yields the boxes that several trainer ranks hold, in the same order on all of them."""
    for number, tensor in enumerate(layout.tensors):
        holders: dict[Box, set[int]] = {}
        for shard in layout.shard_map(tensor).shards:
            holders.setdefault(shard.box, set()).update(shard.ranks)
        for box, ranks in holders.items():
            if len(ranks) > 1:
                yield _Replica(number, tensor, box, tuple(sorted(ranks)))
