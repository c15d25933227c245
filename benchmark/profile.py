"""Where the time of an update goes, by process and step: `python -m benchmark.profile [CASE ...]`.

Trainer ranks hold shards of rows, and processes stand in for engine ranks, except in the cases named `live-...`, whose
engine is SGLang's. Steps are timed from outside, in wall seconds and in CPU seconds of their thread; a step includes
those that it calls. Figures are of the rank that takes longest: of the first update, and medians of the warm ones.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmark import matrices, pages, profile_live, results
from benchmark.matrices import Matrices, MatrixParts
from benchmark.results import Rows
from benchmark.world import run_world, sender, updates

WARMUPS, UPDATES, DEADLINE_S = 3, 15, 300.0


class Case(NamedTuple):
    model: Matrices
    trainers: int
    engines: int
    transport: str

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.trainers} -> {self.engines}, {self.transport}"


CASES = {
    "control": Case(Matrices("small", 100, 64, 32), 2, 2, "ipc"),
    "dense": Case(matrices.DENSE, 4, 4, "ipc"),
    "moe": Case(matrices.MOE, 4, 4, "ipc"),
    "moe-p2p": Case(matrices.MOE, 4, 4, "p2p"),
    "many-ranks": Case(Matrices("dense", 148, 1024, 512), 4, 16, "ipc"),
}
# Side, step, and what is timed: module, class, method; or package, module, function that the module calls.
STEPS: tuple[tuple[str, str, str, str, str], ...] = (
    ("trainer", "update", "sglang_reshard.trainer.update_sender", "UpdateSender", "update_engines"),
    ("trainer", "publish", "sglang_reshard.trainer.publisher", "ShardPublisher", "publish"),
    ("trainer", "compare with the last update", "sglang_reshard.trainer.publisher", "ShardPublisher", "_has_changed"),
    ("trainer", "status to rank 0", "sglang_reshard.protocol.update_channel", "TrainerChannel", "publish_status"),
    ("trainer", "all statuses", "sglang_reshard.protocol.update_channel", "TrainerChannel", "collect_statuses"),
    ("trainer", "request and answer", "sglang_reshard.trainer.coordinator", "UpdateCoordinator", "_answer"),
    ("trainer", "send", "sglang_reshard.routes.p2p.trainer", "P2pSender", "send"),
    ("trainer", "commands, until the results", "sglang_reshard.trainer.worker", "TrainerWorker", "run"),
    ("engine", "update", "sglang_reshard.engine.receiver", "WeightReceiver", "update"),
    ("engine", "join", "sglang_reshard.engine.receiver", "WeightReceiver", "_begin"),
    ("engine", "look", "sglang_reshard.engine.target_planner", "TargetPlanner", "_plan"),
    ("engine", "votes", "sglang_reshard.engine.context", "UpdateContext", "all_gather"),
    ("engine", "trace", "sglang_reshard.engine.target_planner", "TargetPlanner", "_plan_target"),
    ("engine", "plan", "sglang_reshard.engine.prepared", "Transfers", "plan"),
    ("engine", "connect", "sglang_reshard.engine.prepared", "Transfers", "connect"),
    ("engine", "move", "sglang_reshard.engine.update", "UpdateExecutor", "_move"),
)


Updates = list[dict[str, list[float]]]


class Watch:
    """Times the steps of one side in this process. `updates`: step -> calls, wall and CPU seconds, of each update."""

    def __init__(self, side: str) -> None:
        self.updates: Updates = []
        self._took: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for of, step, module, owner, method in STEPS:
            if of == side:
                self._time(getattr(__import__(module, fromlist=[owner]), owner), method, step)

    def _time(self, owner: Any, method: str, step: str) -> None:
        given = vars(owner)[method]
        stock = given.__func__ if isinstance(given, classmethod) else given

        @functools.wraps(stock)
        def timed(*arguments: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return stock(*arguments, **options)
            finally:
                took = self._took[step]
                took[0] += 1
                took[1] += time.perf_counter() - wall
                took[2] += time.thread_time() - cpu
                if step == "update":  # all others are within it
                    self.updates.append(dict(self._took))
                    self._took.clear()

        setattr(owner, method, classmethod(timed) if isinstance(given, classmethod) else timed)


def train(trainer: Any, case: Case) -> Updates:
    watch = Watch("trainer")
    state = matrices.sharded(case.model, case.trainers)
    sending = sender(trainer, case.transport)
    for _ in range(1 + WARMUPS + UPDATES):
        torch.distributed.barrier()
        sending.update(state)
    sending.close()
    return watch.updates


def serve(rank: int, ranks: int, requests: Any, case: Case) -> Updates:
    watch = Watch("engine")
    for _ in updates(MatrixParts(rank, ranks, case.model), rank, ranks, requests):
        pass
    return watch.updates


def run(case: Case) -> Rows:
    sides = case.trainers, case.engines
    trainers, engines = run_world("benchmark.profile", *sides, case, deadline_s=DEADLINE_S)
    return rows_of(case.name, {"trainer": trainers, "engine": engines})


def rows_of(case: str, updates: Mapping[str, Sequence[Updates]]) -> Rows:
    """Returns the rows of a case, from its sides' ranks' updates: of each step on the rank that takes longest.

    calls  in a warm update
    """
    rows = []
    for side, ranks in updates.items():
        for step in [step for of, step, *_ in STEPS if of == side]:
            by_rank = [_of_step(of_rank, step) for of_rank in ranks]
            if not any(first[0] or warm[0] for first, warm in by_rank):
                continue
            slowest = max(by_rank, key=lambda pair: pair[1][1])
            first = max(pair[0][1] for pair in by_rank)
            calls, wall, cpu = slowest[1]
            seconds = {"warm_seconds": wall, "warm_cpu_seconds": cpu, "first_seconds": first}
            rows.append({"case": case, "side": side, "step": step, "calls": calls, **seconds})
    return rows


def _of_step(updates: Updates, step: str) -> tuple[list[float], list[float]]:
    """Returns calls, wall and CPU seconds of the first update, and medians of the warm ones."""
    nothing = [0.0, 0.0, 0.0]
    taken = [update.get(step, nothing) for update in updates]
    return taken[0], [statistics.median(column) for column in zip(*taken[1 + WARMUPS :], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.profile", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", choices=[[], *CASES, *profile_live.CASES], help="by default all, which are written down"
    )
    cases = parser.parse_args().cases
    rows: Rows = []
    for name in cases or (*CASES, *profile_live.CASES):
        rows += run(CASES[name]) if name in CASES else profile_live.run(name)
    out = results.REPOSITORY / "build" / "profile.json" if cases else None
    pages.publish("profile", "python -m benchmark.profile", rows, out=out)


if __name__ == "__main__":
    main()
