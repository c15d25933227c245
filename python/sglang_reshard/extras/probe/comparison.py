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


def compare(trainer: ByToken, engine: Sequence[ByToken]) -> Differences:
    """Compares the trainer's numbers with those of each data parallel rank of an engine, one rank after the other."""
    ours = _flat(trainer)
    theirs = torch.cat([_flat(rank) for rank in engine])
    return differences(ours.repeat(len(engine)), theirs)


def probed_token(
    sequences: Sequence[Sequence[int]], trainer: ByToken, engine: Sequence[ByToken], index: int
) -> ProbedToken:
    """Returns the token to which a difference of `compare` belongs."""
    rank, left = divmod(index, sum(map(len, trainer)))
    for sequence, logprobs in enumerate(trainer):
        if left < len(logprobs):
            theirs = engine[rank][sequence][left]
            return ProbedToken(sequence, left + 1, sequences[sequence][left + 1], rank, logprobs[left], theirs)
        left -= len(logprobs)
    raise IndexError(index)


def _flat(logprobs: ByToken) -> torch.Tensor:
    return torch.tensor([value for of_sequence in logprobs for value in of_sequence], dtype=torch.float64)
