"""What was found, as tables for people and as rows for benchmark/results/soak.json."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmark.rows import percentile
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


def print_found(console: Console, found: Found) -> None:
    """Processes and clients as tables, then the claims."""
    table = Table(title="what each process holds, MiB: after a tenth of the updates and in the last tenth")
    for column in ("process", "early", "late", "ratio", "bytes per update", "descriptors", "threads", "maps"):
        table.add_column(column, justify="right" if column != "process" else "left")
    for row in found.processes:
        table.add_row(
            row.process,
            f"{row.held_bytes_early / MIB:.1f}",
            f"{row.held_bytes_late / MIB:.1f}",
            f"{row.held_ratio:.4f}" if row.flat else f"[bold red]{row.held_ratio:.4f}[/]",
            f"{row.bytes_per_update:.0f}",
            *(f"{a} -> {b}" for a, b in (row.descriptors, row.threads, row.maps)),
        )
    console.print(table)
    table = Table(title="clients")
    columns = ("client", "requests", "failed", "wrong version", "tokens", "median s", "p99 s", "max s")
    for column in columns:
        table.add_column(column, justify="right")
    for client in _clients(found):
        table.add_row(
            f"{client['client']}{', streams' if client['stream'] else ''}",
            f"{client['requests']:,}",
            str(client["failures"]),
            str(client["wrong_version"]),
            f"{client['tokens']:,}",
            *(f"{client[name]:.3f}" for name in ("seconds_median", "seconds_p99", "seconds_max")),
        )
    console.print(table)
    for complaint in [c for tally in found.tallies for c in tally.complaints]:
        console.print(f"client: {complaint}", markup=False, highlight=False, soft_wrap=True)
    for version in (v for v in found.versions if not v.right):
        what = f"{len(version.differing)} of {version.tensors} tensors differ: {', '.join(version.differing[:3])}"
        console.print(f"version {version.version}: {what}; tokens equal: {version.tokens_equal}", markup=False)
    seconds = [u.seconds for u in found.updated]
    console.print(
        f"{len(seconds)} updates in {found.updated[-1].since:.0f} s; "
        f"an update took {median(seconds):.3f} s (median) to {max(seconds):.3f} s (maximum), the wait for running "
        f"requests included; {len(found.versions)} versions verified",
        highlight=False,
        soft_wrap=True,
    )
    for name, holds in found.claims.items():
        console.print(
            f"{'[green]yes[/]' if holds else '[bold red]NO [/]'} {_CLAIMS[name]}", highlight=False, soft_wrap=True
        )


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
        "update_seconds_p99": percentile(seconds, 99),
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
            "seconds_median": percentile(tally.seconds or [0.0], 50),
            "seconds_p99": percentile(tally.seconds or [0.0], 99),
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
