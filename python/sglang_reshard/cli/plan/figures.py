"""The answer to a question, as data: bytes and seconds, of every rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from sglang_reshard.cli.plan.request import PlanRequest


class Spread(msgspec.Struct, frozen=True):
    """Of one figure over the ranks of a side."""

    min: int
    median: int
    max: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread:
        found = list(values) or [0]
        return cls(min(found), int(statistics.median(found)), max(found))


class EngineRank(msgspec.Struct, frozen=True):
    """Bytes that reach an engine rank, the least that must, those of its buffers; messages that it receives."""

    rank: int
    host: str
    received_bytes: int
    least_bytes: int
    extra_bytes: int
    messages: int


class TrainerRank(msgspec.Struct, frozen=True):
    """Bytes that a trainer rank holds, those that leave it, those of its buffers; messages that it sends."""

    rank: int
    host: str
    shard_bytes: int
    sent_bytes: int
    extra_bytes: int
    messages: int


class Gather(msgspec.Struct, frozen=True):
    """The same update by SGLang's own way: `full_tensor()` on every trainer rank, the whole model to every engine rank.

    trainer_received_bytes  what a trainer rank lacks of all tensors, the most of any rank
    engine_received_bytes   the whole model
    extra_bytes             the largest tensor, whole, on every rank of both sides
    """

    trainer_received_bytes: int
    engine_received_bytes: int
    extra_bytes: int


class Way(msgspec.Struct, frozen=True):
    """A transport that could be asked for: the seconds that the cost model predicts, or what it is refused with."""

    name: str
    seconds: float | None = None
    refused: str = ""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's text.

    model_bytes, tensors  of the checkpoint, as the trainer holds it
    link_bytes            [trainer rank][engine rank]: sent, or read from memory
    predicted_seconds     of the move alone, by the cost model
    messages              of all engine ranks
    refused               what the update would be refused with; then there are no figures
    remark                what the trainer would be told
    seconds_by_step       what this forecast itself took, each step of an engine rank added up
    """

    question: PlanRequest
    tensors: int
    model_bytes: int
    layout_pieces: int
    refused: tuple[str, ...] = ()
    transport: str = ""
    transport_reason: str = ""
    predicted_seconds: float = 0.0
    ways: tuple[Way, ...] = ()
    engine_ranks: tuple[EngineRank, ...] = ()
    trainer_ranks: tuple[TrainerRank, ...] = ()
    link_bytes: tuple[tuple[int, ...], ...] = ()
    gather: Gather | None = None
    messages: int = 0
    remark: str = ""
    seconds_by_step: dict[str, float] = {}

    def spread(self, side: str, figure: str) -> Spread:
        """Of a figure ("sent_bytes") over the ranks of a side ("engine_ranks", "trainer_ranks")."""
        return Spread.of(getattr(rank, figure) for rank in getattr(self, side))
