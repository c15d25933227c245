"""Where the phases of all ranks lie in time. A report has durations; a rank's phases follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_reshard.observability.report import UpdateReport

TRAINER = "trainer rank 0"
_PROCESS = 1
_US = 1e6


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


def trace(report: UpdateReport) -> bytes:
    """Returns the file's bytes: an event for each phase of a rank, and counters of an engine rank's bytes."""
    events: list[dict[str, Any]] = [_meta("process_name", 0, f"update, version {report.weight_version}")]
    tracks: dict[str, int] = {}
    for span in spans(report):
        if span.rank not in tracks:
            tracks[span.rank] = len(tracks) + 1
            events.append(_meta("thread_name", tracks[span.rank], span.rank))
        begin, seconds = round(span.begin * _US, 3), round(span.seconds * _US, 3)
        events.append({"name": span.phase, "ph": "X", "ts": begin, "dur": seconds, **_of(tracks[span.rank])})
    end = round(report.seconds.get("total", 0.0) * _US, 3)
    for rank in report.engine_ranks:
        figures = {"received": rank.received_bytes, "least": rank.least_bytes, "peak extra": rank.peak_extra_bytes}
        name = f"bytes of engine rank {rank.rank}"
        events.append({"name": name, "ph": "C", "ts": end, "args": figures, **_of(tracks.get(TRAINER, 0))})
    about = {"transport": report.transport, "reason": report.transport_reason, "message": report.message}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _meta(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "args": {"name": name}, **_of(track)}


def _of(track: int) -> dict[str, int]:
    return {"pid": _PROCESS, "tid": track}
