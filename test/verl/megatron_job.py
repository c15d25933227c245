"""Run by test_megatron.py: Megatron-Core models over four ranks, and what verl's records of them make of them.

Answers, as JSON, for every case what is wrong on any rank, and some numbers.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from verl.workers.engine.megatron.delta_export import McoreParamExport, build_export_index, mcore_hf_delta_entry

from sglang_reshard.sources.memory_identity import MemoryIdentity
from sglang_reshard.verl.megatron import Megatron
from support import megatron_bridge
from support.case_job import answer_cases
from support.megatron_models import STACKED, Case, checkpoint, logits, megatron_models, parallel, published, reference
from support.partial_states import not_assembled, of_this_rank
from support.world import Trainer

RANKS = 4


# Makes the bridge of a case, given the transformers model and this rank's model chunks.
MakeBridge = Callable[[Case, Any, list[Any]], Any]


def examine(trainer: Trainer, of: tuple[Case, MakeBridge]) -> dict[str, Any]:
    case, make_bridge = of
    model = reference(case)
    expected = checkpoint(model)
    source = Megatron(trainer.rank, trainer.size)
    with parallel(case):
        models = megatron_models(case, expected)
        with torch.no_grad():
            tokens = torch.arange(16).view(2, 8)
            ours, wanted = logits(case, models, tokens), model(tokens).logits
        expected = published(case, expected)
        engine = megatron_bridge.training_engine(models, model.config, make_bridge(case, model, models))
        given = source.tensors(engine)
        index = build_export_index(engine.bridge, engine.module, {})
    state = of_this_rank(given)
    wrong = [
        *not_in_place(index, given),
        *not_assembled(state, expected),
        *not_as_verl_probes(case, index, given, trainer.rank),
    ]
    if ours is not None and not torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6):
        wrong.append(f"logits differ by {(ours - wanted).abs().max()}")
    if not MemoryIdentity(given).unchanged(source.tensors(engine)):
        wrong.append("the same weights are news")
    wrong += after_offload(source, engine, expected)
    pieces = sum(len(state.layout.shard_map(tensor).shards) for tensor in state.layout.tensors)
    return {
        "wrong": wrong,
        "tensors": len(state.layout.tensors),
        "pieces": pieces,
        "logits": ours is not None,
    }


def not_in_place(index: list[McoreParamExport], given: list[Any]) -> list[str]:
    """What is not the memory of a live parameter."""
    live = {record.param.untyped_storage().data_ptr() for record in index if record.param is not None}
    return [f"{name} was copied" for name, t, _ in given if t.numel() and t.untyped_storage().data_ptr() not in live]


def not_as_verl_probes(case: Case, index: list[McoreParamExport], given: list[Any], rank: int) -> list[str]:
    """What verl's own NaN probe, run on the real shard, finds at other places than we do."""
    mine = {name: (tensor, held) for name, tensor, held in given}
    wrong = []
    for record in index:
        if record.param is None or (case.kind == STACKED and ".experts." in record.megatron_name):
            continue  # verl's probe does not stack experts
        values = record.param.detach().flatten()
        slots, _, counts, places, found = mcore_hf_delta_entry(record, 0, torch.arange(values.numel()), values, {})
        ends = [0, *itertools.accumulate(counts.tolist())]
        for (name, shape), first, last in zip(slots, ends, ends[1:], strict=False):
            if first == last:
                continue
            theirs = torch.full(shape, float("nan"))
            theirs.view(-1)[places[first:last].long()] = found[first:last]
            tensor, held = mine[name]
            ours = torch.full(held.shape, float("nan"))
            for piece in held.shard_map.shards_of(rank):
                inside = tuple(slice(a, a + n) for a, n in zip(piece.local_start, piece.box.shape, strict=True))
                ours[piece.box.slices()] = tensor[inside]
            # verl's probe leaves the padding of the vocabulary in.
            if not torch.equal(theirs[: held.shape[0]].nan_to_num(-7), ours.nan_to_num(-7)):
                wrong.append(f"{name}: verl's probe of {record.megatron_name} differs")
    return wrong


def after_offload(source: Megatron, engine: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """What is not found when parameters come back in other memory, changed. Nothing is probed for it again."""
    engine.bridge = None
    for model in engine.module:
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    state = of_this_rank(source.tensors(engine))
    twice = {name: tensor * 2 for name, tensor in expected.items()}
    return [f"after offload: {why}" for why in not_assembled(state, twice)]


def modelled(case: dict[str, Any]) -> tuple[Case, MakeBridge]:
    both_tied = case.pop("both_tied", False)
    return Case(**case), lambda case, *_: megatron_bridge.Bridge(case.tied, both_tied)


def main(cases: list[tuple[Case, MakeBridge]]) -> None:
    answer_cases(RANKS, examine, cases, deadline_s=900)


if __name__ == "__main__":
    megatron_bridge.install()
    main([modelled(case) for case in json.loads(sys.argv[1])])
