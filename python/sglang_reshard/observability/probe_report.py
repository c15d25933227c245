"""Reports a probe: log-probabilities of the same tokens by the trainer and by the engine, after an update."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Outcome = Literal["passed", "mismatch", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "mismatch", "skipped")


class ProbedToken(msgspec.Struct, frozen=True):
    """One token of a probe.

    sequence, position   index of the sequence, and of the token in it
    token                its id
    data_parallel_rank   that the engine's number is from
    trainer, engine      its log-probability after the tokens before it, in nats
    """

    sequence: int
    position: int
    token: int
    data_parallel_rank: int
    trainer: float
    engine: float

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence}, position {self.position} (token {self.token}, data parallel rank "
            f"{self.data_parallel_rank}): engine {self.engine:.6g}, trainer {self.trainer:.6g}"
        )


class ProbeReport(msgspec.Struct, frozen=True):
    """The findings of a probe in one engine. All log-probabilities and differences are in nats.

    weight_version       of the update; None if it left the version unchanged
    skipped              why nothing was compared: the engine is paused, another update came between; else empty
    sequences            token ids
    trainer              log-probabilities of the trainer, by sequence: of all tokens but its first
    engine               the same of the engine, by data parallel rank and sequence
    tokens               number of differences: one for each token and data parallel rank
    mean_difference      mean of |engine - trainer|
    largest_difference   its maximum; infinite if one of the two is no number
    worst                the token with the largest difference
    mean_threshold, largest_threshold   above which a difference is a mismatch; None for no limit
    trainer_seconds      that trainer rank 0 took to compute its log-probabilities
    engine_seconds       from asking the engine until its last answer was compared
    seconds              of both: the whole cost, which the update's `total` does not contain
    """

    weight_version: str | None
    skipped: str = ""
    sequences: tuple[tuple[int, ...], ...] = ()
    trainer: tuple[tuple[float, ...], ...] = ()
    engine: tuple[tuple[tuple[float, ...], ...], ...] = ()
    tokens: int = 0
    mean_difference: float = 0.0
    largest_difference: float = 0.0
    worst: ProbedToken | None = None
    mean_threshold: float | None = None
    largest_threshold: float | None = None
    trainer_seconds: float = 0.0
    engine_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def outcome(self) -> Outcome:
        if self.skipped:
            return "skipped"
        return "mismatch" if self.exceeded() else "passed"

    @property
    def passed(self) -> bool:
        """True if the engine was asked and no threshold was exceeded."""
        return self.outcome == "passed"

    def exceeded(self) -> str:
        """Returns which thresholds the differences exceed, with both numbers; empty if none."""
        pairs = (
            ("mean", self.mean_difference, self.mean_threshold),
            ("largest", self.largest_difference, self.largest_threshold),
        )
        return " and ".join(
            f"the {name} difference is {found:.4g} nats, more than {name}_threshold={limit:g}"
            for name, found, limit in pairs
            if limit is not None and found > limit
        )

    def line(self) -> str:
        """Returns the probe as one line."""
        if self.skipped:
            return f"not probed: {self.skipped}"
        return (
            f"{self.outcome}: {self.tokens} tokens, mean difference {self.mean_difference:.4g} nats, largest "
            f"{self.largest_difference:.4g} at {self.worst}; {self.seconds:.3f} s"
        )

    def summary(self) -> ProbeSummary:
        """Returns what an engine's metrics show."""
        largest, mean = (d if math.isfinite(d) else None for d in (self.largest_difference, self.mean_difference))
        return ProbeSummary(self.outcome, mean, largest, self.seconds)


class ProbeSummary(msgspec.Struct, frozen=True):
    """A probe's outcome as an engine's metrics show it.

    outcome             "passed", "mismatch" or "skipped"
    mean_difference     mean of |engine - trainer|, in nats; None if it is infinite
    largest_difference  maximum of |engine - trainer|, in nats; None if it is infinite
    seconds             that the probe took
    """

    outcome: Outcome
    mean_difference: NotNegative | None
    largest_difference: NotNegative | None
    seconds: NotNegative
