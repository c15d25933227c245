"""What was found, as rows for benchmark/results/soak.json, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from benchmark.soak.launcher import Found, Soak
from benchmark.soak.verdict import FLAT_WITHIN, LEAST_LEAD, SPARE

MIB = 2**20
# Points of each process's memory that are written, each the mean of a part of all updates.
_POINTS = 50

_CLAIMS = {
    "updated": "every update succeeded",
    "no_failed_request": "every request of every client was answered in full",
    "no_wrong_version": "every answer was of a version that was due, and none older than the client's last",
    "memory_flat": f"each process holds within {FLAT_WITHIN:.0%} at the end what it held after a tenth of the updates",
    "nothing_piles_up": f"no process has {SPARE} more descriptors, threads or mapped regions than it had then",
    "verified": "every version that was due to be verified is bit for bit what a stock load leaves, and says the same",
}


def rows(soak: Soak, found: Found) -> list[dict[str, Any]]:
    return [_summary(soak, found), *_clients(found), *_processes(found), *_versions(found)]


def said(found: Found) -> Iterator[str]:
    """Yields what people want to know: complaints of clients, versions that differ, and the claims."""
    yield from (f"client: {complaint}" for tally in found.tallies for complaint in tally.complaints)
    for version in (v for v in found.versions if not v.right):
        what = f"{len(version.differing)} of {version.tensors} tensors differ: {', '.join(version.differing[:3])}"
        yield f"version {version.version}: {what}; tokens equal: {version.tokens_equal}"
    for name, holds in found.claims.items():
        yield f"{'yes' if holds else 'NO '} {_CLAIMS[name]}"


def _summary(soak: Soak, found: Found) -> dict[str, Any]:
    seconds = [u.seconds for u in found.updated]
    shared = [u.shared_memory_bytes for u in found.updated]
    return {
        "row": "summary",
        "ok": found.ok,
        "claims": found.claims,
        "updates": soak.updates,
        "verified_every": soak.every,
        "versions_verified": sum(row.right for row in found.versions),
        "seconds": found.updated[-1].since,
        "updates_per_second": len(seconds) / found.updated[-1].since,
        "update_seconds_median": median(seconds),
        "update_seconds_p99": float(np.percentile(seconds, 99)),
        "update_seconds_max": max(seconds),
        "requests": sum(len(t.seconds) for t in found.tallies),
        "failures": sum(t.failures for t in found.tallies),
        "wrong_version": sum(t.wrong_version for t in found.tallies),
        "tokens": sum(t.tokens for t in found.tallies),
        "held_ratio_max": max((row.held_ratio for row in found.processes), default=0.0),
        "flat_within": FLAT_WITHIN,
        "least_lead": LEAST_LEAD,
        "shared_memory_bytes": [shared[0], shared[-1]],
    }


def _clients(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "row": "client",
            "client": number,
            "stream": tally.stream,
            "requests": len(tally.seconds),
            "failures": tally.failures,
            "wrong_version": tally.wrong_version,
            "tokens": tally.tokens,
            "seconds_median": median(tally.seconds or [0.0]),
            "seconds_p99": float(np.percentile(tally.seconds or [0.0], 99)),
            "seconds_max": max(tally.seconds, default=0.0),
            "complaints": tally.complaints,
        }
        for number, tally in enumerate(found.tallies)
    ]


def _processes(found: Found) -> list[dict[str, Any]]:
    return [
        {"row": "process", **msgspec.to_builtins(row), "held_mib": _points(found, row.process)}
        for row in found.processes
    ]


def _points(found: Found, process: str) -> list[float]:
    held = [u.processes[process].held_bytes for u in found.updated]
    size = -(-len(held) // _POINTS)
    return [round(fmean(held[i : i + size]) / MIB, 3) for i in range(0, len(held), size)]


def _versions(found: Found) -> list[dict[str, Any]]:
    return [{"row": "version", "right": row.right, **msgspec.to_builtins(row)} for row in found.versions]
