"""Reports what an update moved and how long it took: bytes, seconds and memory, by phase and rank."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_reshard.observability.probe_report import ProbeReport

if TYPE_CHECKING:
    from rich.table import Table

_MAX_ROWS = 8  # ranks of one side that are shown one by one
_WIDTH = 100
_ORDER = {"publish": -1, "total": 1, "probe": 2}  # of phases that trainer rank 0 measures, around the others


class Traffic(msgspec.Struct, frozen=True):
    """The bytes that one engine rank received in an update, over any route.

    received_bytes  that reached this rank
    read_bytes      trainer rank -> bytes of its memory that this rank read or was sent
    relayed_bytes   of those received, bytes read from the memory of other engines
    compared        elements that the trainer has compared with its base; 0 if all weights were sent
    changed         of these, elements that changed
    detour          why weights came from the trainer that were to come another way; empty if none did
    remark          on the route, for the trainer's report
    digest          of all weights, if the route has compared them itself; see `Strategy.compares`
    """

    received_bytes: int = 0
    read_bytes: dict[int, int] = {}
    relayed_bytes: int = 0
    compared: int = 0
    changed: int = 0
    detour: str = ""
    remark: str = ""
    digest: str = ""

    @classmethod
    def of(cls, read_bytes: dict[int, int]) -> Traffic:
        """Returns that of a rank that received this from trainer ranks, and nothing else."""
        return cls(sum(read_bytes.values()), read_bytes)

    def report(self, **others: Any) -> RankReport:
        """Returns the report of a rank that received this, with its other fields."""
        shared = set(self.__struct_fields__).intersection(RankReport.__struct_fields__)
        return RankReport(**{name: getattr(self, name) for name in shared}, **others)


class RankReport(msgspec.Struct, frozen=True):
    """One engine rank's part.

    rank              the engine rank
    received_bytes    bytes that it received by broadcast or p2p, or read from trainer memory
    least_bytes       bytes that it lacked, in the trainer's dtypes; only deltas can be less
    peak_extra_bytes  the most memory that the update took beyond the engine's own: on CPU the rise of resident memory
                      without mapped pages, on GPU the allocator's peak; at least the buffers, whether they are new,
                      kept from the last update or in freed memory
    seconds           phase -> seconds
    staged_bytes      bytes of the extra memory for new weights while old ones serve
    relayed_bytes     of those received, bytes read from the memory of other engines
    compared          elements that the trainer has compared with its base; 0 if all weights were sent
    changed           of these, elements that changed
    foreign_bytes     growth of the GPU's memory outside of torch's allocator (contexts, NCCL), from before the update
                      until its end: an upper bound, as other processes on the GPU count too; 0 on CPU
    read_bytes        trainer rank -> bytes of its memory that this rank read or was sent
    """

    rank: int
    received_bytes: int
    least_bytes: int
    peak_extra_bytes: int
    seconds: dict[str, float]
    staged_bytes: int = 0
    foreign_bytes: int = 0
    relayed_bytes: int = 0
    compared: int = 0
    changed: int = 0
    read_bytes: dict[int, int] = {}


def received_bytes(ranks: Iterable[RankReport]) -> int:
    """Returns the bytes that all engine ranks received together."""
    return sum(rank.received_bytes for rank in ranks)


def peak_extra_bytes(ranks: Iterable[RankReport]) -> int:
    """Returns the maximum over all engine ranks."""
    return max((rank.peak_extra_bytes for rank in ranks), default=0)


def slowest_seconds(ranks: Iterable[RankReport]) -> dict[str, float]:
    """Returns phase -> seconds of the slowest engine rank."""
    slowest: dict[str, float] = {}
    for rank in ranks:
        for phase, seconds in rank.seconds.items():
            slowest[phase] = max(seconds, slowest.get(phase, 0.0))
    return slowest


def bytes_per_second(ranks: Iterable[RankReport], slowest: Mapping[str, float]) -> float:
    """Returns the bytes of all engine ranks divided by the slowest rank's `move`; 0 if that was not measured."""
    move = slowest.get("move", 0.0)
    return received_bytes(ranks) / move if move > 0 else 0.0


def summary(ranks: Sequence[RankReport], transport: str, weight_version: str | None, seconds: float) -> str:
    """Returns a successful update as one line for a log."""
    version = f"version {weight_version}, " if weight_version is not None else ""
    return (
        f"{version}{received_bytes(ranks) / 1000000000.0:.3f} GB to {count(len(ranks), 'engine')} with transport "
        f"{transport} in {seconds:.3f} s"
    )


class TrainerRankReport(msgspec.Struct, frozen=True):
    """One trainer rank's part: bytes of its shards, and bytes that engine ranks were sent or read from its memory."""

    rank: int
    shard_bytes: int
    sent_bytes: int


class UpdateReport(msgspec.Struct, frozen=True):
    """One update of one engine. `print(report)` shows it as a table, for any number of ranks.

    The same on every trainer rank, except `trainer_ranks` and the `read_bytes` of engine ranks, which only trainer
    rank 0 has, and the names in `message` that each rank ignores with `partial=True`.

    verified  how the received weights were compared with the trainer's: "off", "sample" or "full"
    delta     only changed elements were sent
    digest    of all weights, the same for any layout and size of either side (`landings.checked.whole_model`); empty
              unless verified == "full"
    message   a note to the trainer, such as names that the engine does not use
    kept      names of the engine's parameters, and of parts, that were not sent and keep their values: `frozen`
    kept_versions  weight_version -> names of the kept parameters that have it, and "draft.*" of draft models that were
              left; empty if an engine does not number its weights
    seconds   phase -> seconds: `publish`, `total` and `probe` (not part of `total`) on trainer rank 0, the
              others on the slowest engine rank
    probe     what a probe found, see `probe.Probe`; None without one
    """

    success: bool
    message: str
    weight_version: str | None
    transport: str
    transport_reason: str
    bucket_bytes: int
    seconds: dict[str, float]
    engine_ranks: tuple[RankReport, ...]
    trainer_ranks: tuple[TrainerRankReport, ...]
    verified: str = "off"
    digest: str = ""
    delta: bool = False
    kept: tuple[str, ...] = ()
    kept_versions: dict[str, tuple[str, ...]] = {}
    probe: ProbeReport | None = None

    @classmethod
    def failed(cls, message: str, weight_version: str | None) -> UpdateReport:
        """Returns the report of an engine that was not updated."""
        return cls(False, message, weight_version, "", "", 0, {}, (), ())

    @property
    def received_bytes(self) -> int:
        return received_bytes(self.engine_ranks)

    @property
    def relayed_bytes(self) -> int:
        return sum(rank.relayed_bytes for rank in self.engine_ranks)

    @property
    def changed_share(self) -> float | None:
        """The share of changed elements; None if all weights were sent."""
        compared = sum(rank.compared for rank in self.engine_ranks)
        return sum(rank.changed for rank in self.engine_ranks) / compared if self.delta and compared else None

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
        """Returns the update as one line for a log."""
        return summary(self.engine_ranks, self.transport, self.weight_version, self.seconds.get("total", 0.0))

    def table(self) -> Table:
        """Returns a rich table of the update, its phases and the bytes by rank; for many ranks min, median and max."""
        from rich.table import Table
        from rich.text import Text  # elsewhere rich takes the brackets in tensor names for markup

        whole = Table.grid()
        facts = Table.grid(padding=(0, 2))
        for name, value in overview(self):
            facts.add_row(name, Text(value))
        whole.add_row(facts)
        whole.add_row(_phases(self))
        engine = [(r.rank, (r.received_bytes, r.least_bytes, r.peak_extra_bytes)) for r in self.engine_ranks]
        whole.add_row(_ranks("engine", ("received", "least possible", "peak extra"), engine))
        trainer = [(r.rank, (r.shard_bytes, r.sent_bytes)) for r in self.trainer_ranks]
        whole.add_row(_ranks("trainer", ("holds", "sent or read of it"), trainer))
        return whole

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        """Returns the table without colours, at most 100 characters wide."""
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=_WIDTH, color_system=None, force_terminal=False).print(self.table())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def count(ranks: int, side: str) -> str:
    """Returns "1 engine rank" or "4 engine ranks"."""
    return f"{ranks} {side} rank{'s' * (ranks != 1)}"


def format_bytes(nbytes: float) -> str:
    """Returns `nbytes` in the unit that leaves one to three digits before the point; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def overview(report: UpdateReport) -> list[tuple[str, str]]:
    """Returns what holds for all ranks, as (name, value)."""
    rows = [
        ("version", report.weight_version if report.weight_version is not None else "(unchanged)"),
        ("transport", f"{report.transport}: {report.transport_reason}"),
        ("verified", f"{report.verified}, digest {report.digest}" if report.digest else report.verified),
        (
            "received",
            f"{format_bytes(report.received_bytes)} by {count(len(report.engine_ranks), 'engine')}"
            + ("" if report.changed_share is None else f": {report.changed_share:.2%} of elements changed"),
        ),
        ("rate", f"{format_bytes(report.bytes_per_second)}/s during the slowest rank's move"),
        ("bucket", format_bytes(report.bucket_bytes)),
    ]
    if report.probe is not None:
        rows.append(("probe", report.probe.line()))
    if report.message:
        rows.append(("note", report.message))
    return rows


def titled_table(title: str, first: str, *others: str) -> Table:
    """Returns a table with these columns. All but the first are for numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _phases(report: UpdateReport) -> Table:
    table = titled_table("seconds", "phase", "min", "median", "max", "slowest rank")
    for phase in sorted(report.seconds, key=lambda phase: _ORDER.get(phase, 0)):
        by_rank = [(rank.seconds[phase], rank.rank) for rank in report.engine_ranks if phase in rank.seconds]
        if phase in _ORDER or not by_rank:
            table.add_row(phase, "", "", f"{report.seconds[phase]:.4f}", "trainer rank 0")
            continue
        seconds = [s for s, _ in by_rank]
        slowest = f"engine rank {max(by_rank)[1]}"
        table.add_row(phase, *(f"{s:.4f}" for s in (min(seconds), median(seconds), max(seconds))), slowest)
    return table


def _ranks(side: str, columns: Sequence[str], ranks: Sequence[tuple[int, tuple[int, ...]]]) -> Table:
    table = titled_table(f"bytes of {count(len(ranks), side)}", f"{side} rank", *columns)
    rows: list[tuple[str, Iterable[float]]]
    if len(ranks) <= _MAX_ROWS:
        rows = [(str(rank), values) for rank, values in ranks]
    else:
        by_column = list(zip(*(values for _, values in ranks), strict=True))
        rows = [(name, map(pick, by_column)) for name, pick in (("min", min), ("median", median), ("max", max))]
    for name, values in rows:
        table.add_row(name, *map(format_bytes, values))
    return table
