"""Inverts a program: the boxes of each checkpoint tensor in an engine rank's live memory, and their places.

An engine that has been updated can so be read like a trainer. The tensors that its loader has copied are in live
memory, or in the scratch memory for operands of expressions; values that a step has changed since are lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.trace.checkpoint_order_view import shard_view
from sglang_reshard.trace.folded import UNFOLD
from sglang_reshard.trace.geometry import BoxMapping
from sglang_reshard.trace.program import Copy, Program


@dataclass(frozen=True, slots=True)
class LiveShard:
    """One engine rank's part of a checkpoint tensor.

    tensor    a view of its memory, of the dtype that the engine has
    sharding  lists this rank's boxes only
    """

    name: str
    tensor: torch.Tensor
    sharding: ExplicitSharding


def live_shards(program: Program, shapes: Mapping[str, tuple[int, ...]], engine_rank: int) -> list[LiveShard]:
    """Returns the shards that a rank holds after an update by `program`, in the order in which it copies them.

    shapes  global shape (elements) of each checkpoint tensor

    Raises Unsupported, naming the tensor, for one that cannot be read back from where it was copied to.
    """
    shards, unreadable = readable_shards(program, shapes, engine_rank)
    for name, why in unreadable.items():
        raise Unsupported(
            f"engine rank {engine_rank}: {name} cannot be read from the live weights: {why}. Update engines of this "
            "model from the trainer"
        )
    return shards


def readable_shards(
    program: Program, shapes: Mapping[str, tuple[int, ...]], engine_rank: int
) -> tuple[list[LiveShard], dict[str, str]]:
    """Returns the shards of tensors that can be read back, and why others cannot, by name."""
    changed = {step.target for step in program.steps if step.description.startswith("from ")} | set(program.arrivals)
    folded = tuple(f"{step.target}." if step.target else "" for step in program.steps if step.description == UNFOLD)
    changed |= {target for target in program.targets if target.startswith(folded)} if folded else set()
    copies: dict[str, list[Copy]] = {}
    for copy in program.copies:
        copies.setdefault(copy.source, []).append(copy)
    shards, unreadable = [], {}
    for name, of_tensor in copies.items():
        kept = [copy for copy in of_tensor if copy.target not in changed]
        try:
            if converted := [copy.target for copy in of_tensor if copy.target in program.arrivals]:
                # Another engine would read the rest of it, and convert only what its own trainer ranks send.
                raise Unsupported(f"the engine converts it where it arrives, for {converted[0]}")
            if not kept:
                raise Unsupported(
                    f"the loader computes {of_tensor[0].target} from it in place, so its own values are not kept"
                )
            tensor, boxes = _held(program, kept)
        except Unsupported as error:
            unreadable[name] = str(error)
            continue
        shard_map = ShardMap.of((box, start, engine_rank) for box, start in boxes)
        shards.append(LiveShard(name, tensor, ExplicitSharding(shapes[name], shard_map)))
    return shards, unreadable


def _held(program: Program, copies: list[Copy]) -> tuple[torch.Tensor, list[tuple[Box, tuple[int, ...]]]]:
    """Returns a view that shows the elements written by `copies` as boxes, and these boxes, each with its start in the
    view.
    """
    found: dict[str, list[BoxMapping]] = {}
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for copy in copies:
        for mapping in _without_gaps(copy):
            if (key := (mapping.start, mapping.size)) not in seen:  # else a tied weight
                seen.add(key)
                found.setdefault(copy.target, []).append(mapping)
    if len(found) > 1:
        raise Unsupported(f"its parts are in {' and '.join(found)}")
    ((target, mappings),) = found.items()
    flat = program.targets[target]
    view, starts = shard_view(mappings, (flat.numel(),))
    tensor = flat if view is None else flat.as_strided(view.size, view.stride, view.offset)
    stops = (tuple(a + n for a, n in zip(m.start, m.size, strict=True)) for m in mappings)
    return tensor, [(Box(m.start, stop), at) for m, stop, at in zip(mappings, stops, starts, strict=True)]


def _without_gaps(copy: Copy) -> Iterator[BoxMapping]:
    """Yields the boxes that a strided region consists of."""
    region = copy.region
    unit = (1,) * len(region.count)
    strided = [d for d, (n, step) in enumerate(zip(region.count, region.step, strict=True)) if n > 1 and step > 1]
    size = tuple(1 if d in strided else n for d, n in enumerate(region.count))
    for index in itertools.product(*(range(region.count[d]) for d in strided)):
        start, offset = list(region.start), copy.offset
        for d, i in zip(strided, index, strict=True):
            start[d] += i * region.step[d]
            offset += i * copy.strides[d]
        yield BoxMapping(tuple(start), size, unit, offset, copy.strides)
