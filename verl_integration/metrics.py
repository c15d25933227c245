"""Computes the metrics of a sync for verl's logger."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_reshard.observability.report import UpdateReport, peak_extra_bytes


def sync_metrics(reports: Mapping[str, UpdateReport], seconds: float) -> dict[str, float]:
    """Returns the metrics of one sync from the reports of all engines (replicas).

    seconds  of the whole sync on trainer rank 0

    reshard/seconds             of the whole sync
    reshard/bytes_per_rank      bytes received, on the engine rank that received the most
    reshard/gb_per_s            these over the whole sync, in 10^9 bytes per second
    reshard/peak_extra_bytes    peak memory beyond its own, on the engine rank that used the most
    reshard/sent_bytes_rank0    bytes that engine ranks read or received of trainer rank 0's shards; tensors that
                                several engine ranks hold, such as norms, count for each. On trainer rank 0 only, whose
                                metrics verl logs
    reshard/seconds/PHASE       on the slowest rank
    reshard/transport/NAME      number of engines updated by this transport
    reshard/delta               number of engines that were sent what had changed only
    reshard/changed_share       of elements, on the engine with the most changes
    """
    ranks = [rank for report in reports.values() for rank in report.engine_ranks]
    received = max((rank.received_bytes for rank in ranks), default=0)
    found = {
        "reshard/seconds": seconds,
        "reshard/bytes_per_rank": float(received),
        "reshard/gb_per_s": received / seconds / 1e9 if seconds > 0 else 0.0,
        "reshard/peak_extra_bytes": float(peak_extra_bytes(ranks)),
    }
    if all(report.trainer_ranks for report in reports.values()):
        sent = sum(report.trainer_ranks[0].sent_bytes for report in reports.values())
        found["reshard/sent_bytes_rank0"] = float(sent)
    for report in reports.values():
        for phase, spent in report.seconds.items():
            key = f"reshard/seconds/{phase}"
            found[key] = max(spent, found.get(key, 0.0))
        key = f"reshard/transport/{report.transport}"
        found[key] = found.get(key, 0.0) + 1.0
        if report.changed_share is not None:
            found["reshard/delta"] = found.get("reshard/delta", 0.0) + 1.0
            found["reshard/changed_share"] = max(report.changed_share, found.get("reshard/changed_share", 0.0))
    return found


def transport_reasons(reports: Mapping[str, UpdateReport]) -> str:
    """Returns a sentence on each engine's transport and the reason for it."""
    engines: dict[str, list[str]] = {}
    for name, report in reports.items():
        engines.setdefault(f"{report.transport}: {report.transport_reason}", []).append(name)
    return "; ".join(f"{', '.join(names)}: {what}" for what, names in engines.items())
