"""Trainer ranks that hold different values under one name: after a failed update the error names them and the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_reshard.landings.checked.disagreement import disagreement
from sglang_reshard.landings.checked.messages import CHANGED_UNDER_WAY
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, ShardMap, describe
from support.refusals import refusal_of
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of
from support.world import run_world


def serve(rank: int, size: int, requests: Any, *_: Any) -> str:
    receiver = receiver_of(ToyRank(rank, size))
    list(answered(receiver, requests))
    return receiver.torn


def train(trainer: Any, kind: str, options: dict[str, Any]) -> str:
    sender = trainer.sender()
    state: dict[str, Any] = checkpoint(1)
    if kind == "half of all":  # under the names of the other half
        state = dict(list(checkpoint(1 + trainer.rank).items())[:4])
    elif kind == "one" and trainer.rank:
        state["down.weight"] = state["down.weight"] + 1
    elif kind == "unknown":
        state["unknown.weight"] = torch.ones(4)
    return refusal_of(lambda: sender.update(state, **options))[1]


@pytest.mark.parametrize("partial", [False, True])
def test_where_weights_differ_from_the_trainers_its_ranks_are_compared(partial: bool) -> None:
    told, _ = run_world(2, 2, train, serve, "one", {"verify": "full", "partial": partial})
    assert told[0] == told[1]
    assert "the received weights differ from the trainer's: down.weight. Trainer ranks [0, 1] hold" in told[0]
    for cure in ("different values of down.weight", "global names", "rename=", "ExplicitSharding"):
        assert cure in told[0]
    assert CHANGED_UNDER_WAY not in told[0]
    assert "weights are torn: repeat the update" in told[0]


def test_where_weights_of_each_rank_are_refused_its_ranks_are_compared() -> None:
    told, torn = run_world(2, 2, train, serve, "half of all", {"partial": True})
    assert told[0] == told[1]
    assert "is not written by the loader at all" in told[0]
    assert "Trainer ranks [0, 1] hold different values of embed.weight, q.weight, k.weight, v.weight: a" in told[0]
    assert torn == ["", ""]


def test_ranks_that_agree_are_not_suspected() -> None:
    told, _ = run_world(2, 2, train, serve, "unknown", {"partial": True, "verify": "full"})
    assert "rejected the tensors at unknown.weight" in told[0]
    assert "Trainer ranks" not in told[0]


@pytest.mark.parametrize("selection", [Selection.full(), Selection.sample(1, one_in=2)])
def test_only_what_several_ranks_hold_is_compared(selection: Selection) -> None:
    """Of three ranks, two hold the first rows each of another tensor, at different places."""
    rows = [(Box((0, 0), (2, 3)), (0, 0), 0), (Box((0, 0), (2, 3)), (1, 0), 1), (Box((2, 0), (3, 3)), (0, 0), 2)]
    sharding = ExplicitSharding((3, 3), ShardMap.of(rows))
    own = [torch.full((2, 3), 7.0), torch.full((3, 3), 7.0), torch.full((1, 3), 9.0)]
    states = [
        describe([("w", held, sharding), ("scale", torch.tensor(1.0))], trainer_rank=rank, global_ranks=(0, 1, 2))
        for rank, held in enumerate(own)
    ]
    sums: list[bytes] = []

    def exchange(told: bytes) -> list[bytes]:
        sums.append(told)
        return [*sums, *[b""] * (len(states) - len(sums))]

    def compared() -> str:
        sums.clear()
        for rank, state in enumerate(states):
            found = disagreement(state.layout, lambda state=state: state.shards, rank, selection, exchange)  # type: ignore[misc]
        return found

    assert compared() == ""
    own[1][2] = 8.0
    assert "Trainer ranks [0, 1] hold different values of w:" in compared()
