"""Where the phases of all ranks lie in time. A report has durations; a rank's phases follow each other."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_reshard.observability.report import UpdateReport

TRAINER = "trainer rank 0"


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a rank: seconds from the begin of the update, and how many it lasts."""

    rank: str
    phase: str
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


def spans(report: UpdateReport) -> list[Span]:
    """Returns the phases of trainer rank 0 and of each engine rank, in order of time.

    The update begins with `publish` of trainer rank 0. The phases of an engine rank are placed after it, without gaps.
    """
    published = report.seconds.get("publish", 0.0)
    total = report.seconds.get("total", published)
    found = [Span(TRAINER, "publish", 0.0, published)] if published else []
    if total > published:
        found.append(Span(TRAINER, "wait for the engine", published, total - published))
    for rank in report.engine_ranks:
        begin = published
        for phase, seconds in rank.seconds.items():
            found.append(Span(f"engine rank {rank.rank}", phase, begin, seconds))
            begin += seconds
    if "probe" in report.seconds:
        found.append(Span(TRAINER, "probe", total, report.seconds["probe"]))
    return found
