"""Experts that move between ranks while an engine serves: the loader is traced anew, and a staged update refused."""

from __future__ import annotations

import time
from typing import Any

import torch

from support.refusals import refusal_of
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

MOVED_AFTER = 2


def train(trainer: Any, staged: bool) -> list[list[str]]:
    sender = trainer.sender()
    return [refusal_of(lambda n=n: sender.update(checkpoint(n), staged=staged)) for n in range(1, 5)]  # type: ignore[misc]


def serve_after_a_move(rank: int, size: int, requests: Any, _staged: bool) -> list[int]:
    """By which trace each update was made."""
    placed = [b"0123"]
    receiver = receiver_of(ToyRank(rank, size), placement=lambda: placed[0])
    traces = []
    for version, request in enumerate(requests, start=1):
        output = receiver.update(request)
        traces.append(receiver._executor._planner._planned)
        if version == MOVED_AFTER:
            placed[0] = b"1032"
        requests.answer(output)
    return [traces.index(trace) for trace in traces]


def test_the_loader_is_traced_anew_once_experts_have_moved() -> None:
    (told,), traces = run_world(1, 2, train, serve_after_a_move, False)
    assert [error for error, _ in told] == [""] * 4
    assert traces == [[0, 0, 2, 2]] * 2


def serve_staged(rank: int, size: int, requests: Any, _staged: bool) -> list[bool]:
    """Whether the live weights are those of before each update; experts move on rank 1 while the second is staged."""
    placed = [b"0123"]
    model = ToyRank(rank, size)
    receiver = receiver_of(model, placement=lambda: placed[0])
    same = []
    for version, request in enumerate(requests, start=1):
        before = model.down.clone()
        assert receiver.stage(request).success
        while receiver.staged() is None:
            time.sleep(0.01)
        if version == MOVED_AFTER and rank == 1:
            placed[0] = b"1032"
        requests.answer(receiver.commit(request))
        same.append(torch.equal(before, model.down))
    return same


def test_a_staged_update_is_refused_if_experts_have_moved_meanwhile() -> None:
    (told,), same = run_world(1, 2, train, serve_staged, True)
    assert [bool(error) for error, _ in told] == [False, True, False, False]
    assert "engine rank 1: experts were rebalanced after the update was staged; repeat the update" in told[1][1]
    assert same == [[False, True, False, False]] * 2
