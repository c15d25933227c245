"""Control of an update against the number of ranks: `python -m benchmark.control`."""

from __future__ import annotations

import os
import resource

from benchmark import results
from benchmark.control.measure import ENGINE_RANKS, measure

PATH = results.FOLDER / "control.json"
POINTS = [(64, 4), (128, 8), (256, 8), (512, 16), (1024, 8), (1024, 16), (1024, 32)]  # trainer ranks, engines


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    for verify in (False, True):
        for trainer_ranks, engines in POINTS:
            rows.append(row := measure(trainer_ranks, engines, verify))
            print(
                f"{trainer_ranks} trainer ranks, {engines} engines of {ENGINE_RANKS}, verify {verify}: "
                f"{row.seconds_median:.3f} s, {row.messages} messages, {row.server_bytes_a_rank} bytes a rank",
                flush=True,
            )
    notes = [f"{os.cpu_count()} cores carry the server and all ranks."]
    results.save(PATH, results.header("make bench-control", notes), rows)


if __name__ == "__main__":
    main()
