"""What an update did, as every trainer rank is told: bytes, seconds, memory, per phase and rank."""

from __future__ import annotations

from typing import Any

import msgspec


class RankReport(msgspec.Struct, frozen=True):
    """One engine rank's part.

    received_bytes    bytes that reached it: over its groups, or read from a trainer rank's memory
    least_bytes       bytes it lacked, in the trainer's dtypes: no transport can receive less
    peak_extra_bytes  the most memory that the update took beyond the engine's own: on CPU the rise of
                      resident memory without mapped pages, on GPU the allocator's peak; at least the
                      buffers, whether they are new, kept from the last update or in freed memory
    seconds           phase -> seconds
    staged_bytes      of the extra memory, what new weights were kept in beside the old ones
    """

    rank: int
    received_bytes: int
    least_bytes: int
    peak_extra_bytes: int
    seconds: dict[str, float]
    staged_bytes: int = 0


class TrainerRankReport(msgspec.Struct, frozen=True):
    """One trainer rank's part: bytes of its shards, and how many of them engine ranks read from its memory."""

    rank: int
    shard_bytes: int
    sent_bytes: int


class UpdateReport(msgspec.Struct, frozen=True):
    """One update, the same on every trainer rank.

    verified           how what has arrived was compared with what was sent: "off", "sample" or "full"
    message            what the trainer should know, such as names that the engine has no use for
    predicted_seconds  what the cost model expected the `move` to take
    seconds            phase -> seconds: `publish` and `total` as trainer rank 0 saw them, the others of the slowest
                       engine rank
    """

    success: bool
    message: str
    weight_version: str | None
    transport: str
    transport_reason: str
    predicted_seconds: float
    bucket_bytes: int
    seconds: dict[str, float]
    engine_ranks: tuple[RankReport, ...]
    trainer_ranks: tuple[TrainerRankReport, ...]
    verified: str = "off"

    def as_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)
