"""Computes differences of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_reshard.observability.probe_report import ProbedToken

ByToken = Sequence[Sequence[float]]  # by sequence and position; the first position has none


class Differences(NamedTuple):
    """|ours - theirs|: mean, maximum, the index of the maximum, and how many there are."""

    mean: float
    largest: float
    largest_at: int
    tokens: int


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> Differences:
    """Compares log-probabilities: 1-D tensors of equal, positive length.

    Equal infinities do not differ. If one of two values is no number, their difference is infinite.
    """
    ours, theirs = ours.double(), theirs.double()
    found = (ours - theirs).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    found = torch.where(ours == theirs, 0.0, found)
    largest_at = int(found.argmax())
    return Differences(float(found.mean()), float(found[largest_at]), largest_at, found.numel())


def compare(
    sequences: Sequence[Sequence[int]], trainer: ByToken, engine: Sequence[ByToken]
) -> tuple[Differences, ProbedToken]:
    """Compares the trainer's numbers with those of each data parallel rank of an engine.

    Returns the token with the largest difference, too.
    """
    tokens = [
        ProbedToken(number, position, token, rank, ours[position - 1], of_rank[number][position - 1])
        for rank, of_rank in enumerate(engine)
        for number, (sequence, ours) in enumerate(zip(sequences, trainer, strict=True))
        for position, token in enumerate(sequence[1:], start=1)
    ]
    found = differences(*torch.tensor([(t.trainer, t.engine) for t in tokens], dtype=torch.float64).T)
    return found, tokens[found.largest_at]
