"""Run by test_megatron_refit.py: Megatron-Core models moved from one parallel layout to another.

Every layout is built once, and serves as the source and as the target of any number of moves. Each element has a number
that its index in the global tensor gives, by Megatron-Core's own metadata for distributed checkpoints
(`sharded_state_dict`). The names and boxes that a plan is given come from elsewhere: converters to the checkpoint's
format, traced as for an update.

Answers, as JSON, what is wrong of every move, by rank.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from sglang_reshard import ReshardPlan
from sglang_reshard.sources import ExplicitSharding
from sglang_reshard.verl.megatron import Megatron
from support import megatron_bridge
from support.case_job import answer_cases
from support.megatron_models import Case, initial_models, parallel, reference
from support.world import Trainer

BUCKET_BYTES = 4096
_ROOM = 1 << 18  # numbers of a key: float32 has twice their sum exactly
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")

Listed = list[tuple[str, torch.Tensor, ExplicitSharding]]


class Piece(NamedTuple):
    """Elements that this rank has of one of Megatron-Core's global tensors.

    key      of the global tensor
    data     live memory of a parameter, without the padding of the vocabulary, which no checkpoint has
    numbers  of its elements, different for all elements of a model, the same in all layouts
    """

    key: str
    data: torch.Tensor
    numbers: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """This rank's part of a model in one parallel layout.

    listed  its tensors under their names in the checkpoint: those that this rank holds elements of, and no others
    """

    listed: Listed
    pieces: list[Piece]

    @classmethod
    def build(cls, case: Case, first: Numbers) -> Layout:
        with parallel(case):
            models = initial_models(case)
            bridge = megatron_bridge.Bridge(case.tied, both_tied=True)
            engine = megatron_bridge.training_engine(models, reference(case).config, bridge)
            listed = Megatron(dist.get_rank(), dist.get_world_size()).tensors(engine)
            described = [shard for model in models for shard in _described(model)]
        first.extend(shard.key for shard in described)
        return cls(listed, [_piece(shard, first.of[shard.key], case.vocabulary) for shard in described])

    def write(self, version: int) -> None:
        """Writes the values of a version in place, as an optimizer does."""
        for piece in self.pieces:
            piece.data.copy_(piece.numbers * 2 + version)

    def clear(self) -> None:
        for piece in self.pieces:
            piece.data.fill_(-1)

    def wrong(self, version: int) -> list[str]:
        return [p.key for p in self.pieces if not torch.equal(p.data, p.numbers * 2 + version)]

    def held(self) -> set[float]:
        """The numbers of the elements that this rank has."""
        return set(torch.cat([piece.numbers.flatten() for piece in self.pieces]).tolist())


class Numbers:
    """Where the numbers of each global tensor begin: alike on all ranks, though each knows only its own tensors."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def extend(self, keys: Iterable[str]) -> None:
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, sorted(set(keys)))
        for key in (key for keys in everyones for key in keys):
            self.of.setdefault(key, _ROOM * len(self.of))


def _described(model: Any) -> list[ShardedTensor]:
    """Returns a model's parameters as Megatron-Core describes them for a distributed checkpoint."""
    described = model.sharded_state_dict(metadata={"dp_cp_group": mpu.get_data_parallel_group(True)})
    apply_factories(described)
    shards = [shard for shard in nested_values(described) if isinstance(shard, ShardedTensor)]
    memory = {shard.data.untyped_storage().data_ptr() for shard in shards}
    assert memory == {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return shards


def _piece(shard: ShardedTensor, first: int, vocabulary: int) -> Piece:
    size = math.prod(shard.global_shape)
    assert size <= _ROOM, shard
    numbers = torch.arange(first, first + size, dtype=torch.float32).view(shard.global_shape)[shard.global_slice()]
    rows = max(0, vocabulary - shard.global_offset[0]) if shard.key.endswith(_PADDED) else None
    return Piece(shard.key, shard.data.detach()[:rows], numbers[:rows])


def move(source: Layout, target: Layout) -> list[str]:
    """Two runs of a plan. Returns what is wrong on this rank."""
    source.write(0)
    target.clear()
    plan = ReshardPlan.make(source.listed, target.listed, bucket_bytes=BUCKET_BYTES)
    wrong = []
    for version in (0, 1):
        source.write(version)
        plan.run()
        wrong += [f"{key} of run {version}" for key in target.wrong(version)]
    lacking = 4 * len(target.held() - source.held())
    if plan.received_bytes != lacking:
        wrong.append(f"{plan.received_bytes} bytes were received; the rank lacks {lacking}")
    if plan.extra_bytes > 4 * BUCKET_BYTES:
        wrong.append(f"{plan.extra_bytes} bytes of buckets")
    return wrong


def examine(
    _: Trainer, pair: tuple[Case, Case], layouts: dict[tuple[str, Case], Layout], numbers: Numbers
) -> list[str]:
    sides = list(zip(("source", "target"), pair, strict=True))
    for side in sides:
        if side not in layouts:
            layouts[side] = Layout.build(side[1], numbers)
    return move(*(layouts[side] for side in sides))


def main(ranks: int, pairs: list[list[dict[str, Any]]]) -> None:
    cases = [tuple(Case(**sizes) for sizes in pair) for pair in pairs]
    answer_cases(ranks, examine, cases, {}, Numbers(), deadline_s=1400)


if __name__ == "__main__":
    megatron_bridge.install()
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
