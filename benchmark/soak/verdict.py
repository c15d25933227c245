"""What counts as passed. Pure functions over what was seen, so that a test can feed them anything."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, linear_regression

import msgspec

from benchmark.soak.clients import Tally
from benchmark.soak.expected import Expected
from benchmark.soak.footprint import Footprint
from benchmark.soak.seen import Updated, Verified
from benchmark.soak.weights import is_verified
from sglang_reshard.selftest.digests import differing

FLAT_WITHIN = 0.02
# Below this lead of a logit over the next best, two orders of summing float32 may choose another token.
LEAST_LEAD = 1e-3
# Connections and pools come and go; what an update leaves behind would be there once for every update.
SPARE = 16


class ProcessRow(msgspec.Struct, frozen=True):
    """One process. early: after a tenth of the updates, up to a fifth. late: in the last tenth. See `Footprint`.

    bytes_per_update  slope of the line through all that was held after the first tenth
    descriptors, threads, maps  how many after the first tenth, and how many after the last update
    """

    process: str
    held_bytes_early: float
    held_bytes_late: float
    held_ratio: float
    bytes_per_update: float
    resident_bytes_early: float
    resident_bytes_late: float
    descriptors: tuple[int, int]
    threads: tuple[int, int]
    maps: tuple[int, int]
    flat: bool

    @property
    def piled_up(self) -> bool:
        return any(last - first > SPARE for first, last in (self.descriptors, self.threads, self.maps))


class VersionRow(msgspec.Struct, frozen=True):
    """One verified version; the update itself verified it in full, too.

    differing      "engine rank: path" of every live tensor that is not bit for bit what a stock load leaves there
    tokens_equal   with those of transformers
    lead           the smallest in those tokens; below LEAST_LEAD another token is no mistake
    """

    version: int
    tensors: int
    differing: list[str]
    tokens_equal: bool
    lead: float

    @property
    def right(self) -> bool:
        return bool(self.tensors) and not self.differing and (self.tokens_equal or self.lead < LEAST_LEAD)


def processes(updated: Sequence[Updated]) -> list[ProcessRow]:
    """Of every process that was looked at; nothing where there are too few updates to tell."""
    return [_process(name, [u.processes[name] for u in updated]) for name in (updated[0].processes if updated else ())]


def versions(verified: Sequence[Verified], expected: dict[int, Expected]) -> list[VersionRow]:
    return [_version(found, expected[found.version]) for found in verified]


def claims(
    updates: int,
    every: int,
    updated: Sequence[Updated],
    tallies: Sequence[Tally],
    of_processes: Sequence[ProcessRow],
    of_versions: Sequence[VersionRow],
) -> dict[str, bool]:
    """claim -> whether it holds. With nothing seen, nothing holds."""
    return {
        "updated": [u.version for u in updated] == list(range(1, updates + 1)),
        "no_failed_request": bool(tallies) and all(t.seconds and not t.failures for t in tallies),
        "no_wrong_version": bool(tallies) and all(t.seconds and not t.wrong_version for t in tallies),
        "memory_flat": bool(of_processes) and all(row.flat for row in of_processes),
        "nothing_piles_up": bool(of_processes) and not any(row.piled_up for row in of_processes),
        "verified": bool(of_versions)
        and [row.version for row in of_versions] == [v for v in range(1, updates + 1) if is_verified(v, every)]
        and all(row.right for row in of_versions),
    }


def _process(name: str, holds: Sequence[Footprint]) -> ProcessRow:
    tenth = max(1, len(holds) // 10)
    early, late = holds[tenth : 2 * tenth], holds[-tenth:]
    before, after = (fmean(f.held_bytes for f in part) for part in (early or late, late))
    settled = [f.held_bytes for f in holds[tenth:]]
    slope = linear_regression(range(len(settled)), settled).slope if len(settled) > 1 else 0.0
    first = (early or late)[0]
    return ProcessRow(
        process=name,
        held_bytes_early=before,
        held_bytes_late=after,
        held_ratio=after / before,
        bytes_per_update=slope,
        resident_bytes_early=fmean(f.resident_bytes for f in early or late),
        resident_bytes_late=fmean(f.resident_bytes for f in late),
        descriptors=(first.descriptors, holds[-1].descriptors),
        threads=(first.threads, holds[-1].threads),
        maps=(first.maps, holds[-1].maps),
        flat=len(holds) > 2 * tenth and abs(after / before - 1) <= FLAT_WITHIN,
    )


def _version(found: Verified, expected: Expected) -> VersionRow:
    wrong = differing(found.digests, expected.digests)
    tensors = sum(len(stock) for stock in expected.digests)
    equal = found.tokens == expected.tokens
    return VersionRow(found.version, tensors, wrong, equal, expected.lead)
