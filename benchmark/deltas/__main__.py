"""What changes from step to step, and what sending only that saves: `python -m benchmark.deltas`, needs root and tc.

changes  a supervised run of a small Qwen3 at three learning rates
grpo     verl's main_ppo with the tiny model of examples/tiny_on_cpu.py, its trainer apart from its rollouts
links    a Qwen3 of 50 million parameters that is trained on one host, and sent to others over shaped links after every
         step: full updates and deltas in turn
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmark import pages, plots, results
from benchmark.deltas.job import Job, Way
from benchmark.deltas.training import SMALL, Trainer, changed_share
from benchmark.hosts.__main__ import run

if str(results.REPOSITORY / "test") not in sys.path:  # hosts and verl runs are the tests'
    sys.path[:0] = [str(results.REPOSITORY / "test"), str(results.REPOSITORY / "test" / "verl")]

from support.hosts import Host, laboratory, why_not

RESULT = results.FOLDER / "deltas.json"
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
STEPS_BEFORE, STEPS, GRPO_STEPS = 200, 100, 6
RATES = ("1gbit", "100mbit")
LOW, HIGH = LEARNING_RATES[:2]
ONE = (Way("p2p", "off"), Way("p2p", "auto"), Way("p2p", "auto", False, HIGH), Way("nixl", "off"), Way("nixl", "auto"))
BACKGROUND = (Way("p2p", "off", background=True), Way("p2p", "auto", background=True))
SEVERAL = (Way("nixl", "off", True), Way("nixl", "auto", True))  # receivers pass on what they have read
_DEADLINE_S = 900.0


class Changes(msgspec.Struct, frozen=True):
    """Shares of bfloat16 elements that change in a step, of the last half of a run's steps."""

    run: str
    learning_rate: float
    steps: int
    changed_median: float
    changed_max: float


class Link(msgspec.Struct, frozen=True):
    """One way over one kind of link. Medians of updates; received_bytes by one receiver; publish includes encoding."""

    rate: str
    receivers: int
    transport: str
    relay: bool
    delta: str
    learning_rate: float
    model_bytes: int
    received_bytes: int
    changed: float | None
    seconds: float
    publish_seconds: float
    compare_seconds: float
    move_seconds: float
    updates: int
    bit_exact: bool


class Meanwhile(msgspec.Struct, frozen=True):
    """Training steps beside an update in the background, over one kind of link. Medians."""

    rate: str
    transport: str
    delta: str
    step_seconds: float
    meanwhile_seconds: float
    steps_meanwhile: int


def supervised() -> Iterator[Changes]:
    trainer = Trainer(SMALL, STEPS_BEFORE)
    for learning_rate in LEARNING_RATES:
        trainer.begin(learning_rate)
        shares = []
        for _ in range(STEPS):
            before = trainer.kept()
            trainer.step()
            shares.append(changed_share(before, trainer.kept()))
        yield _changes("supervised", learning_rate, shares)


def grpo() -> Changes:
    from support.verl_host import run_ppo, verl_folder
    from test_ppo import APART, FOUR_ANSWERS

    ours = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard"
    settings = [f"actor_rollout_ref.actor.optim.lr={LOW}", "actor_rollout_ref.rollout.dtype=bfloat16"]
    settings += [f"{ours}.transport=p2p", f"{ours}.delta=auto", FOUR_ANSWERS, *APART]
    with verl_folder() as folder:
        run = run_ppo(folder, *settings, steps=GRPO_STEPS, timeout_s=_DEADLINE_S)
    return _changes("GRPO", LOW, [step["reshard/changed_share"] for step in run.steps])


def _changes(run: str, learning_rate: float, shares: Sequence[float]) -> Changes:
    last = shares[len(shares) // 2 :]
    return Changes(run, learning_rate, len(shares), statistics.median(last), max(last))


def over_links(rate: str, receivers: int, ways: tuple[Way, ...]) -> Iterator[Link | Meanwhile]:
    with laboratory(1 + receivers, rate=rate, names_lead_to_loopback=False) as hosts, _folder() as folder:
        job = Job(str(folder), hosts[0].address, ways, receivers=receivers)
        placed: list[tuple[str, msgspec.Struct, Host]] = [("train", job, hosts[0])]
        placed += [("receive", msgspec.structs.replace(job, rank=n), hosts[1 + n]) for n in range(receivers)]
        run(placed, "benchmark.deltas.job")
        timed = json.loads((folder / "timed").read_text())
        for way, of_way in zip(ways, timed, strict=True):
            reports = [report for of_update in of_way["reports"] for report in of_update]
            ranks = [report["engine_ranks"][0] for report in reports]
            if way.background:
                step, meanwhile = statistics.median(of_way["alone"]), of_way["meanwhile"]
                yield Meanwhile(rate, way.transport, way.delta, step, statistics.median(meanwhile), len(meanwhile))
                continue
            exact = [(folder / f"exact-{way.name}-{n}").read_text() == "True" for n in range(receivers)]
            publish, compare, move = (
                statistics.median(report["seconds"].get(phase, 0.0) for report in reports)
                for phase in ("publish", "compare", "move")
            )
            yield Link(
                rate,
                receivers,
                way.transport,
                way.relay,
                way.delta,
                way.learning_rate,
                reports[0]["trainer_ranks"][0]["shard_bytes"],
                round(statistics.median(rank["received_bytes"] for rank in ranks)),
                statistics.median(r["changed"] / r["compared"] for r in ranks) if ranks[0]["compared"] else None,
                statistics.median(of_way["seconds"]),
                publish,
                compare,
                move,
                job.updates,
                all(exact),
            )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmark.deltas", description=__doc__).parse_args(arguments)
    if reason := why_not():
        sys.exit(reason)
    rows: list[Changes | Link | Meanwhile] = []
    for receivers, ways in ((1, ONE), (2, SEVERAL), (1, BACKGROUND)):
        for rate in RATES if ways is not BACKGROUND else RATES[-1:]:
            for row in over_links(rate, receivers, ways):
                print(row, flush=True)
                rows.append(row)
    rows += [*supervised(), grpo()]
    results.save(RESULT, results.header("make bench-deltas", []), rows)
    plots.plot_deltas(results.load(RESULT)[1], RESULT.with_suffix(".png"))
    pages.write("deltas")
    print(pages.TABLES["deltas"].text())
    return 0 if all(row.bit_exact for row in rows if isinstance(row, Link)) else 1


if __name__ == "__main__":
    sys.exit(main())
