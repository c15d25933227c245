"""What an update did, as every trainer rank is told: bytes, seconds, memory, per phase and rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.table import Table


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


def received_bytes(ranks: Iterable[RankReport]) -> int:
    """Of all engine ranks together."""
    return sum(rank.received_bytes for rank in ranks)


def peak_extra_bytes(ranks: Iterable[RankReport]) -> int:
    """Of the engine rank that took the most."""
    return max((rank.peak_extra_bytes for rank in ranks), default=0)


def slowest_seconds(ranks: Iterable[RankReport]) -> dict[str, float]:
    """phase -> seconds of the engine rank that took longest."""
    found: dict[str, float] = {}
    for rank in ranks:
        for phase, seconds in rank.seconds.items():
            found[phase] = max(seconds, found.get(phase, 0.0))
    return found


def bytes_per_second(ranks: Iterable[RankReport], slowest: Mapping[str, float]) -> float:
    """What all engine ranks received over the slowest one's `move`; 0 where that is not known."""
    move = slowest.get("move", 0.0)
    return received_bytes(ranks) / move if move > 0 else 0.0


def line(ranks: Sequence[RankReport], transport: str, weight_version: str | None, seconds: float) -> str:
    """A successful update in a line, for a log."""
    version = f"version {weight_version}, " if weight_version is not None else ""
    return (
        f"{version}{received_bytes(ranks) / 1e9:.3f} GB to {len(ranks)} engine ranks by {transport} in {seconds:.3f} s"
    )


class TrainerRankReport(msgspec.Struct, frozen=True):
    """One trainer rank's part: bytes of its shards, and how many of them engine ranks read from its memory."""

    rank: int
    shard_bytes: int
    sent_bytes: int


class UpdateReport(msgspec.Struct, frozen=True):
    """One update, the same on every trainer rank. `print(report)` shows it as a table, also where there are many ranks.

    verified           how what has arrived was compared with what was sent: "off", "sample" or "full"
    digest             of all weights, the same for any layout and size of either side (`digest.whole`), where
                       verified == "full"
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
    digest: str = ""

    @property
    def received_bytes(self) -> int:
        return received_bytes(self.engine_ranks)

    @property
    def bytes_per_second(self) -> float:
        return bytes_per_second(self.engine_ranks, self.seconds)

    @property
    def peak_extra_bytes(self) -> int:
        return peak_extra_bytes(self.engine_ranks)

    def as_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    def json(self) -> str:
        return msgspec.json.encode(self).decode()

    def line(self) -> str:
        """In a line, for a log."""
        return line(self.engine_ranks, self.transport, self.weight_version, self.seconds.get("total", 0.0))

    def table(self) -> Table:
        """For rich: phases, then bytes of engine and trainer ranks; least, median and most where there are many."""
        from sglang_reshard.observability.report_table import table_of

        return table_of(self)

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from sglang_reshard.observability.report_table import text_of

        return text_of(self)
