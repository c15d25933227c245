"""Runs cases one after another, each in processes of its own, and the machine's copy limit beside each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from benchmark import rows
from benchmark.cases import PATHS, STOCK, Case, Effort
from benchmark.environment import environment
from benchmark.results import Rows
from benchmark.trainer import Job, Seen
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import children
from sglang_reshard.selftest.digests import differing
from sglang_reshard.selftest.host import available_bytes

_DEADLINE_S = 3600.0


@dataclass(slots=True)
class Found:
    """rows: of what ran. notes: what did not, and why."""

    rows: Rows = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(cases: Sequence[Case], effort: Effort, console: Console) -> Found:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = Found()
    for case in (c.on(torch.cuda.device_count()) for c in cases):
        if (available := available_bytes()) < case.needed_bytes:
            gib = f"about {case.needed_bytes / 2**30:.0f} GiB of memory, {available / 2**30:.0f} GiB are available"
            found.notes.append(f"{case.name}: skipped, it needs {gib}")
            continue
        paths = PATHS
        if why := _without_stock(case, device, available):
            paths = tuple(path for path in PATHS if path != STOCK)
            found.notes.append(f"{case.name}: without SGLang's own path, {why}")
        console.print(f"{case.name}: {case.model.tensors:,} tensors, {case.model.bytes / 1e6:,.0f} MB, on {device}")
        begin = time.monotonic()
        try:
            _one(case, paths, effort, device, found)
            console.print(f"{case.name}: {time.monotonic() - begin:.0f} s in all")
        except ReshardError as error:
            found.notes.append(f"{case.name}: failed, {str(error).splitlines()[0]}")
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
    return found


def _without_stock(case: Case, device: str, available: int) -> str:
    """Returns why SGLang's own path cannot run; empty if it can."""
    if device == "cuda" and torch.cuda.device_count() < case.trainers:
        return (
            "since trainer ranks share a GPU: its `full_tensor` ends the process with gloo, and NCCL needs a GPU for "
            "each rank"
        )
    if available < case.needed_bytes + case.stock_bytes:
        return (
            f"which takes {case.stock_bytes / 2**30:.0f} GiB more than the {case.needed_bytes / 2**30:.0f} GiB that "
            "the others do"
        )
    return ""


def _one(case: Case, paths: Sequence[str], effort: Effort, device: str, found: Found) -> None:
    with tempfile.TemporaryDirectory(prefix="sglang-reshard-bench-", ignore_cleanup_errors=True) as folder:
        run_ranks("benchmark.trainer", Job(case, tuple(paths), effort, device, folder), _DEADLINE_S)
        seen = msgspec.json.decode(Path(folder, "seen.json").read_bytes(), type=Seen)
    found.rows += rows.rows_of(case, seen)
    found.notes += [f"{case.name}: {path} did not run: {why}" for path, why in seen.refused.items()]
    for timed in seen.timed:
        if wrong := differing(timed.after, seen.reference):
            found.notes.append(f"{case.name}: {timed.path} left {len(wrong)} tensors wrong: {', '.join(wrong[:3])}")


def run_ranks(module: str, job: Job, timeout_s: float) -> None:
    """Runs a module as the trainer ranks of a job."""
    folder = Path(job.folder)
    variables = environment(folder, job.case.engine_tp, job.device, "qwen3", "qwen3_moe")
    command = children.torchrun(job.case.trainers, module, job)
    children.run(command, variables, folder / "log", time.monotonic() + timeout_s, lambda: None)
