"""Damaged deltas, applied between guard pages, over all cores: `python -m benchmark.fuzz_deltas --cases 1000000`.

Half of the cases are of what a trainer rank sends, half of a follower's files. Exits with 1 unless all go well.
"""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console

from benchmark import pages
from benchmark.world import find_tests

_DEADLINE_S = 6 * 3600.0


def main() -> int:
    """The exit status: 0 when nothing went wrong."""
    find_tests()
    from fuzz.delta_runs import KINDS, run_cases

    parser = argparse.ArgumentParser(prog="python -m benchmark.fuzz_deltas", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console, rows = Console(width=140), []
    for kind in KINDS:
        processes = len(os.sched_getaffinity(0))
        found = run_cases(kind, arguments.seed, arguments.cases // len(KINDS), processes, _DEADLINE_S)
        for failure in found.failures:
            console.print(failure, highlight=False, markup=False)
        rows.append(found._asdict())
    command = f"python -m benchmark.fuzz_deltas --cases {arguments.cases} --seed {arguments.seed}"
    pages.publish("fuzz-deltas", command, rows)
    return 1 if any(row["failures"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
