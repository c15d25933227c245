"""How long the plan of DeepSeek-V3 takes, from 64 trainer ranks to 32 engine ranks: `python -m benchmark.planning`.

One process on one core plans for all engine ranks, as one that wants to see the whole plan would. In an
update every engine rank plans for itself only, a thirty-second part of this.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmark.deepseek_v3 import copies, fsdp_layout
from sglang_reshard.messages import pack_blob
from sglang_reshard.plan import Catalog, Seat, Setting, choose, intake, needs_of
from sglang_reshard.plan.streams import order_of

TRAINERS, ENGINES, BUCKET_BYTES = 64, 32, 64 << 20
TRAINERS_A_HOST, ENGINES_A_HOST = 8, 8
RESULTS = Path(__file__).parent / "results" / "planning.json"
T = TypeVar("T")


class Clock:
    """Adds up the seconds of what is run through it, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, step: Callable[[], T]) -> T:
        began = time.perf_counter()
        found = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return found


def measure(ep: int, colocated: bool) -> dict[str, Any]:
    """The plan for tp=32 with experts over `ep` groups; engine ranks on the trainers' first hosts, or on others."""
    clock = Clock()
    trainer_hosts = tuple(f"trainer host {t // TRAINERS_A_HOST}" for t in range(TRAINERS))
    engine_host = "trainer host" if colocated else "engine host"
    layout = fsdp_layout(TRAINERS)
    wire = {"layout": len(clock("pack the layout", lambda: pack_blob(layout))[1]), "orders": 0}
    catalog = clock("catalog", lambda: Catalog.of(layout))
    needs = []
    rows = 0
    for rank in range(ENGINES):
        seat = Seat(rank, ENGINES, f"{engine_host} {rank // ENGINES_A_HOST}", trainer_hosts)
        own = copies(rank, ENGINES, ep)  # what the trace of the rank's loader gives; not part of the plan
        taken = clock("intakes", lambda own=own, seat=seat: intake(catalog, own, seat))  # type: ignore[misc]
        need = clock("needs", lambda taken=taken, seat=seat: needs_of(catalog, taken, seat.host))  # type: ignore[misc]
        for trainer_rank in taken.links():
            order = clock("orders", lambda taken=taken, t=trainer_rank: pack_blob(order_of(taken, t)))  # type: ignore[misc]
            wire["orders"] += len(order[1])
        needs.append(need)
        rows += len(taken.copy)
    wire["needs"] = sum(len(need.pieces) for need in needs)
    choice = clock(
        "choice and groups",
        lambda: choose("auto", catalog, needs, Setting.of(needs, trainer_hosts, "cuda"), BUCKET_BYTES),
    )
    clock("digest", choice.digest)
    received = np.array([need.least_bytes for need in needs])
    return {
        "case": f"DeepSeek-V3, fsdp={TRAINERS} to tp={ENGINES}, ep={ep}, {'colocated' if colocated else 'apart'}",
        "tensors": len(layout.tensors),
        "pieces": catalog.pieces,
        "boxes": rows,
        "bytes": sum(t.spec.nbytes for t in layout.tensors),
        "received_bytes_per_rank": [int(received.min()), int(np.median(received)), int(received.max())],
        "seconds": sum(clock.seconds.values()),
        "seconds_by_step": {name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "compressed_bytes": wire,
        "choice": f"{choice.name} ({choice.why})",
    }


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cases = [(32, False), (32, True), (8, False)]
    if len(sys.argv) == 3:  # one case in a process of its own, so that its peak is its own
        print(json.dumps(measure(*cases[int(sys.argv[2])])))
        return
    import subprocess

    rows = []
    for number in range(len(cases)):
        command = [sys.executable, "-m", "benchmark.planning", "--case", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        rows.append(json.loads(done.stdout))
        print(f"{rows[-1]['case']}: {rows[-1]['seconds']:.1f} s, {rows[-1]['peak_bytes'] / 1e9:.2f} GB at most")
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
