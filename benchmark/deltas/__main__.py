"""What changes from step to step, and what sending only that saves: `python -m benchmark.deltas`, needs root and tc.

changes  a supervised run of a small Qwen3 at three learning rates
grpo     verl's main_ppo with the tiny model of examples/tiny_on_cpu.py, its trainer apart from its rollouts
links    a Qwen3 of 50 million parameters that is trained on one host, and sent to others over shaped links after every
         step: full updates and deltas in turn
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmark import pages, plots, results
from benchmark.deltas.job import Job, Way
from benchmark.deltas.training import SMALL, Trainer, changed_share
from benchmark.hosts.__main__ import run
from benchmark.results import Row, Rows

sys.path.insert(0, str(results.REPOSITORY / "test"))  # hosts, and runs of verl
sys.path.insert(0, str(results.REPOSITORY / "test" / "verl"))

from support.hosts import Host, laboratory, why_not

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
STEPS_BEFORE, STEPS, GRPO_STEPS = 200, 100, 6
RATES = ("1gbit", "100mbit")
LOW, HIGH = LEARNING_RATES[:2]
ONE = (Way("p2p", "off"), Way("p2p", "auto"), Way("p2p", "auto", False, HIGH), Way("nixl", "off"), Way("nixl", "auto"))
BACKGROUND = (Way("p2p", "off", background=True), Way("p2p", "auto", background=True))
SEVERAL = (Way("nixl", "off", True), Way("nixl", "auto", True))  # receivers pass on what they have read
_DEADLINE_S = 900.0


def supervised() -> Iterator[Row]:
    trainer = Trainer(SMALL, STEPS_BEFORE)
    for learning_rate in LEARNING_RATES:
        trainer.begin(learning_rate)
        shares = []
        for _ in range(STEPS):
            before = trainer.kept()
            trainer.step()
            shares.append(changed_share(before, trainer.kept()))
        yield _changes("supervised", learning_rate, shares)


def grpo() -> Row:
    from support.verl_host import run_ppo, verl_folder
    from test_ppo import APART, FOUR_ANSWERS

    ours = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard"
    settings = [f"actor_rollout_ref.actor.optim.lr={LOW}", "actor_rollout_ref.rollout.dtype=bfloat16"]
    settings += [f"{ours}.transport=p2p", f"{ours}.delta=auto", FOUR_ANSWERS, *APART]
    with verl_folder() as folder:
        run = run_ppo(folder, *settings, steps=GRPO_STEPS, timeout_s=_DEADLINE_S)
    return _changes("GRPO", LOW, [step["reshard/changed_share"] for step in run.steps])


def _changes(run: str, learning_rate: float, shares: Sequence[float]) -> Row:
    """Shares of bfloat16 elements that change in a step, of the last half of a run's steps."""
    last = shares[len(shares) // 2 :]
    most = {"changed_median": statistics.median(last), "changed_max": max(last)}
    return {"run": run, "learning_rate": learning_rate, "steps": len(shares), **most}


def over_links(rate: str, receivers: int, ways: tuple[Way, ...]) -> Iterator[Row]:
    """Yields a row for each way: of updates, or of training steps beside an update in the background. Medians.

    received_bytes  by one receiver
    publish         includes encoding
    """
    with laboratory(1 + receivers, rate=rate, names_lead_to_loopback=False) as hosts, TemporaryDirectory() as found:
        folder = Path(found)
        job = Job(str(folder), hosts[0].address, ways, receivers=receivers)
        placed: list[tuple[str, msgspec.Struct, Host]] = [("train", job, hosts[0])]
        placed += [("receive", msgspec.structs.replace(job, rank=n), hosts[1 + n]) for n in range(receivers)]
        run(placed, "benchmark.deltas.job")
        timed = json.loads((folder / "timed").read_text())
        for way, of_way in zip(ways, timed, strict=True):
            reports = [report for of_update in of_way["reports"] for report in of_update]
            ranks = [report["engine_ranks"][0] for report in reports]
            row: Row = {"rate": rate, "transport": way.transport, "delta": way.delta}
            if way.background:
                medians = [statistics.median(of_way[name]) for name in ("alone", "meanwhile")]
                row |= dict(zip(("step_seconds", "meanwhile_seconds"), medians, strict=True))
                yield {**row, "steps_meanwhile": len(of_way["meanwhile"])}
                continue
            for phase in ("publish", "compare", "move"):
                seconds = statistics.median(report["seconds"].get(phase, 0.0) for report in reports)
                row[f"{phase}_seconds"] = seconds
            changed = [r["changed"] / r["compared"] for r in ranks] if ranks[0]["compared"] else []
            yield {
                **row,
                "receivers": receivers,
                "relay": way.relay,
                "learning_rate": way.learning_rate,
                "model_bytes": reports[0]["trainer_ranks"][0]["shard_bytes"],
                "received_bytes": round(statistics.median(rank["received_bytes"] for rank in ranks)),
                "changed": statistics.median(changed) if changed else None,
                "seconds": statistics.median(of_way["seconds"]),
                "updates": job.updates,
                "bit_exact": all((folder / f"exact-{way.name}-{n}").read_text() == "True" for n in range(receivers)),
            }


def main() -> int:
    if reason := why_not():
        sys.exit(reason)
    rows: Rows = []
    for receivers, ways in ((1, ONE), (2, SEVERAL), (1, BACKGROUND)):
        for rate in RATES if ways is not BACKGROUND else RATES[-1:]:
            for row in over_links(rate, receivers, ways):
                print(row, flush=True)
                rows.append(row)
    rows += [*supervised(), grpo()]
    pages.publish("deltas", "make bench-deltas", rows)
    path = pages.TABLES["deltas"].source
    plots.plot_deltas(results.load(path)[1], path.with_suffix(".png"))
    return 0 if all(row.get("bit_exact", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
