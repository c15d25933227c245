"""verl's own sync and ours, by turns between the same workers and the same SGLang servers.

    PYTHONPATH=test:test/verl python -m benchmark.verl [--only TEXT]     # make bench-verl for all

Real verl, Ray and SGLang, as the tests start them (`test/support`). Writes results/verl.json, and from it
docs/results/verl.md.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import typer

from benchmark import pages, results
from benchmark.cases import DENSE, MOE
from benchmark.models import Qwen3
from support.verl_host import run_job, verl_folder

MODELS = {"dense": DENSE, "MoE": MOE}
RANKS, TP_SIZE = 2, 2
_DEADLINE_S = 900.0


def main(only: str = "") -> None:
    """only: cases whose name has it in it; the rows of the others stay."""
    path = pages.TABLES["verl"].source
    rows = results.load(path)[1] if path.exists() else []
    for kind, model in MODELS.items():
        for mode in ("colocated", "disaggregated"):
            case = f"{kind}, {mode}, FSDP2 {RANKS} -> TP {TP_SIZE}"
            if only in case:
                rows = [row for row in rows if row["case"] != case] + _measured(case, mode, model)
                pages.publish("verl", "make bench-verl", rows)


def _measured(case: str, mode: str, model: Qwen3) -> list[dict[str, Any]]:
    print(f"{case}: {model.tensors} tensors, {model.bytes / 1e6:.0f} MB", flush=True)
    started = time.perf_counter()
    with verl_folder() as folder:
        seen = run_job(
            "benchmark.verl.job:measure",
            folder,
            timeout_s=_DEADLINE_S,
            mode=mode,
            model_config=model.config(),
            ranks=RANKS,
            tp_size=TP_SIZE,
        )
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)
    return rows_of(case, model, seen)


def rows_of(case: str, model: Qwen3, seen: dict[str, Any]) -> list[dict[str, Any]]:
    """One for verl's own path and one for ours; seconds of a whole `CheckpointEngineManager.update_weights`."""
    medians = {path: statistics.median(seconds) for path, seconds in seen["seconds"].items()}
    return [
        {
            "case": case,
            "path": path,
            "tensors": model.tensors,
            "bytes": model.bytes,
            "updates": len(seen["seconds"][path]),
            "seconds_median": median,
            "seconds_max": max(seen["seconds"][path]),
            "times_faster": medians["verl"] / median,
            "same_tokens": seen["same_tokens"],
            **(seen["metrics"] if path == "reshard" else {}),
        }
        for path, median in medians.items()
    ]


if __name__ == "__main__":
    typer.run(main)
