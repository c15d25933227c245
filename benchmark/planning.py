"""How long the plan of DeepSeek-V3 takes, from 64 trainer ranks to 32 engine ranks: `python -m benchmark.planning`.

One process on one core plans for all engine ranks, as one that wants to see the whole plan would. In an
update every engine rank plans for itself only, a thirty-second part of this.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from benchmark import pages
from benchmark.deepseek_v3 import copies, fsdp_layout
from benchmark.results import Row
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.layout.decoders import pack_blob
from sglang_reshard.plan import ClusterTopology, RankLocation, ReadPlan, TensorIndex, plan_reads, rank_demand
from sglang_reshard.routes import choose_strategy
from sglang_reshard.routes.p2p.messages import send_request

TRAINERS, ENGINES, BUCKET_BYTES = 64, 32, 64 << 20
RANKS_A_HOST = 8
_DEADLINE_S = 600.0
T = TypeVar("T")


class Case(msgspec.Struct, frozen=True):
    """Engine ranks with experts over `ep` groups, on the trainers' own hosts or on others."""

    ep: int
    colocated: bool

    @property
    def name(self) -> str:
        hosts = "on the trainers' hosts" if self.colocated else "on other hosts"
        return f"DeepSeek-V3, fsdp={TRAINERS} -> tp={ENGINES}, ep={self.ep}, {hosts}"


CASES = (Case(32, False), Case(32, True), Case(8, False))


class Clock:
    """Adds up the seconds of what is run through it, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, step: Callable[[], T]) -> T:
        began = time.perf_counter()
        found = step()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return found


def measure(case: Case) -> Row:
    """Makes one whole plan in this process.

    boxes           that all engine ranks take in
    bytes           of the checkpoint; received_bytes is what an engine rank lacks of it, the median
    peak_bytes      the most memory that the process had, libraries included
    layout_bytes, needs_bytes, orders_bytes  compressed, as they go through the session: the layout, what engine ranks
                    tell each other of their needs, and all their orders to trainer ranks
    """
    clock = Clock()
    trainer_hosts = tuple(f"host {t // RANKS_A_HOST}" for t in range(TRAINERS))
    trainer_gpus = tuple(RankGpuInfo(f"GPU {t % RANKS_A_HOST} of {host}") for t, host in enumerate(trainer_hosts))
    layout = fsdp_layout(TRAINERS)
    layout_bytes = len(clock("pack the layout", lambda: pack_blob(layout))[1])
    catalog = clock("catalog", lambda: TensorIndex.of(layout))
    needs, boxes, orders_bytes = [], 0, 0
    for rank in range(ENGINES):
        host = f"host {rank // RANKS_A_HOST}" if case.colocated else f"engine host {rank // RANKS_A_HOST}"
        copied = copies(rank, ENGINES, case.ep)  # what the trace of the rank's loader gives; not part of the plan
        gpu = RankGpuInfo(f"GPU {rank % RANKS_A_HOST} of {host}")
        seat = RankLocation(rank, ENGINES, host, trainer_hosts, gpu, trainer_gpus)
        taken = clock("intakes", lambda copied=copied, seat=seat: plan_reads(catalog, copied, seat))  # type: ignore[misc]
        needs.append(clock("needs", lambda taken=taken, host=host, gpu=gpu: rank_demand(catalog, taken, host, gpu)))  # type: ignore[misc]
        orders_bytes += clock("orders", lambda taken=taken: _orders_bytes(taken))  # type: ignore[misc]
        boxes += len(taken.copy_ids)
    setting = ClusterTopology.of(needs, trainer_hosts, trainer_gpus)
    choice = clock("choice and groups", lambda: choose_strategy("auto", catalog, needs, setting, BUCKET_BYTES))
    clock("digest", choice.digest)
    return {
        "case": case.name,
        "tensors": len(layout.tensors),
        "pieces": catalog.num_shards,
        "boxes": boxes,
        "bytes": sum(t.spec.nbytes for t in layout.tensors),
        "received_bytes": int(statistics.median(need.least_bytes for need in needs)),
        "seconds": sum(clock.seconds.values()),
        "seconds_by_step": {name: round(seconds, 3) for name, seconds in clock.seconds.items()},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "layout_bytes": layout_bytes,
        "needs_bytes": sum(len(need.shards) for need in needs),
        "orders_bytes": orders_bytes,
        "transport": choice.name,
        "transport_reason": choice.reason,
    }


def _orders_bytes(taken: ReadPlan) -> int:
    return sum(len(pack_blob(send_request(taken, trainer_rank))[1]) for trainer_rank in taken.traffic())


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if len(sys.argv) == 2:  # one case, in a process of its own
        print(msgspec.json.encode(measure(msgspec.json.decode(sys.argv[1], type=Case))).decode())
        return
    rows = []
    for case in CASES:
        command = [sys.executable, "-m", "benchmark.planning", msgspec.json.encode(case).decode()]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_DEADLINE_S)
        rows.append(msgspec.json.decode(done.stdout))
    pages.publish("planning", "python -m benchmark.planning", rows)


if __name__ == "__main__":
    main()
