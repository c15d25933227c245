"""What a sync tells verl's logger."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_reshard.observability.report import UpdateReport


def metrics_of(reports: Mapping[str, UpdateReport], seconds: float) -> dict[str, float]:
    """The metrics of one sync, from the report of each engine (replica).

    seconds  of the whole sync, as trainer rank 0 saw it

    reshard/seconds             of the whole sync
    reshard/bytes_per_rank      bytes that the engine rank with the most received
    reshard/gb_per_s            those, over the whole sync, in 10^9 bytes per second
    reshard/peak_extra_bytes    the most memory that an engine rank took beyond its own
    reshard/sent_bytes_rank0    bytes that engine ranks took of trainer rank 0's shards: each what it lacks, so what all
                                of them hold, as norms, counts for each
    reshard/seconds/PHASE       of the slowest rank
    reshard/predicted_seconds   what the cost model expected `move` to take
    reshard/transport/NAME      how many engines were reached this way
    """
    ranks = [rank for report in reports.values() for rank in report.engine_ranks]
    received = max((rank.received_bytes for rank in ranks), default=0)
    found = {
        "reshard/seconds": seconds,
        "reshard/bytes_per_rank": float(received),
        "reshard/gb_per_s": received / seconds / 1e9 if seconds > 0 else 0.0,
        "reshard/peak_extra_bytes": float(max((rank.peak_extra_bytes for rank in ranks), default=0)),
        "reshard/sent_bytes_rank0": float(sum(report.trainer_ranks[0].sent_bytes for report in reports.values())),
        "reshard/predicted_seconds": max((report.predicted_seconds for report in reports.values()), default=0.0),
    }
    for report in reports.values():
        for phase, spent in report.seconds.items():
            key = f"reshard/seconds/{phase}"
            found[key] = max(spent, found.get(key, 0.0))
        key = f"reshard/transport/{report.transport}"
        found[key] = found.get(key, 0.0) + 1.0
    return found


def reasons_of(reports: Mapping[str, UpdateReport]) -> str:
    """Which transport each engine was reached by, and why, in words."""
    said: dict[str, list[str]] = {}
    for name, report in reports.items():
        said.setdefault(f"{report.transport}: {report.transport_reason}", []).append(name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in said.items())
