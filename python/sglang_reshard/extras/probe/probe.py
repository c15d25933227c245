"""Defines the probe of an update, as a user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

# Measured differences of bfloat16 engines are in docs/usage/probe.md: both limits are well above rounding.
MEAN_THRESHOLD = 0.05
LARGEST_THRESHOLD = 1.0
_MOST_TOKENS = 65_536  # of all sequences: each difference is a Python float

Logprobs = Sequence[torch.Tensor | Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Sequences whose log-probabilities are compared after an update. The same on all trainer ranks.

    sequences          token ids, at least two in each; a few dozen tokens in all are enough
    logprobs           the trainer's log-probabilities: a module whose output has logits (or is logits), a function
                       that takes the sequences, or the numbers themselves. One tensor, or sequence of floats, of
                       n - 1 elements for each sequence of n tokens: entry i is log p(token i + 1 | tokens up to i) at
                       temperature 1. A module or function is called on every trainer rank, before anything is sent;
                       trainer rank 0's numbers count
    mean_threshold     largest mean of |engine - trainer| over all tokens, in nats; None for no limit
    largest_threshold  largest |engine - trainer| of one token, in nats; None for no limit
    on_mismatch        "raise" ProbeMismatch, or "warn": log it; either way it is in the report
    engine             on trainer rank 0: the object to ask, or by engine name a mapping of such objects, with a method
                       `generate` that takes the arguments of `sglang.Engine.generate`, or such a function. By default
                       the engine, client or server whose method `send` is; of `WeightSender(url)`, the server
    timeout_s          seconds to wait for the engine's answers; by default `timeout_s` of the sender

    Raises ValueError for sequences that cannot be probed.
    """

    sequences: Sequence[Sequence[int]]
    logprobs: torch.nn.Module | Callable[[list[list[int]]], Logprobs] | Logprobs
    mean_threshold: float | None = MEAN_THRESHOLD
    largest_threshold: float | None = LARGEST_THRESHOLD
    on_mismatch: Literal["raise", "warn"] = "raise"
    engine: Any = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("a probe needs at least one sequence of token ids")
        for number, tokens in enumerate(self.sequences):
            if len(tokens) < 2:
                raise ValueError(
                    f"sequence {number} of the probe has {len(tokens)} tokens; it needs at least 2, because the first "
                    "token has no log-probability"
                )
            if any(int(token) != token or token < 0 for token in tokens):
                raise ValueError(f"sequence {number} of the probe has token ids that are negative or not integers")
        if (tokens_in_all := sum(map(len, self.sequences))) > _MOST_TOKENS:
            raise ValueError(f"the probe has {tokens_in_all} tokens; at most {_MOST_TOKENS} are supported")
        if self.on_mismatch not in ("raise", "warn"):
            raise ValueError(f"on_mismatch={self.on_mismatch!r} is not supported; use 'raise' or 'warn'")
        for name in ("mean_threshold", "largest_threshold"):
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:
                raise ValueError(f"{name}={limit} must not be negative")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s} must be positive")

    def token_ids(self) -> list[list[int]]:
        """Returns the sequences as lists of Python integers."""
        return [[int(token) for token in tokens] for tokens in self.sequences]

    def engine_named(self, name: str, send: Any) -> Any:
        """Returns the object to ask about the engine to which `send` sends requests; None if there is none."""
        given = self.engine.get(name) if isinstance(self.engine, Mapping) else self.engine
        return getattr(send, "__self__", None) if given is None else given
