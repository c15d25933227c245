"""Control of an update against the number of ranks: `python -m benchmark.control`."""

from __future__ import annotations

import os
import resource

from benchmark import pages
from benchmark.control.measure import measure

POINTS = [(64, 4), (128, 8), (256, 8), (512, 16), (1024, 8), (1024, 16), (1024, 32)]  # trainer ranks, engines


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = [measure(*point, verify) for verify in (False, True) for point in POINTS]
    notes = [f"{os.cpu_count()} cores carry the server and all ranks."]
    pages.publish("control", "make bench-control", rows, notes)


if __name__ == "__main__":
    main()
