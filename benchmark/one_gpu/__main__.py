"""Updates a real SGLang engine that shares one GPU with its trainer ranks: `python -m benchmark.one_gpu`.

It needs SGLang and one GPU. The engine has one rank, CUDA graphs and SGLang's memory saver; the trainer ranks have
FSDP2 shards. Every weight of the engine is compared with a stock load from disk, and log-probabilities with those of
transformers. Another engine has a prefix cache in host memory, too. On a host without a GPU, `--rehearse` runs the same
steps with a tiny model and prints what it sees.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmark import launcher, results
from benchmark.cases import HOST_CACHE_CASE, ONE_GPU_CASES, TINY_CASES, Case, Effort
from benchmark.trainer import Job
from sglang_reshard.errors import ReshardError

RESULTS = results.FOLDER / "one-gpu.json"


@dataclass(slots=True)
class Found:
    """rows: a row for each step that ended. notes: cases that did not end, and why."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.one_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a host without a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for each case")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("this host has no GPU; pass --rehearse")
    found = Found()
    device = "cpu" if options.rehearse else "cuda"
    cases = (*ONE_GPU_CASES, HOST_CACHE_CASE)
    for case, tiny in zip(cases, (*TINY_CASES, TINY_CASES[0]), strict=True):
        if options.only in case.kind:
            _run(replace(case, model=tiny.model) if options.rehearse else case, device, options.deadline_s, found)
            if not options.rehearse:  # after each, should the next one not end
                head = results.header(" ".join(["python -m benchmark.one_gpu", *sys.argv[1:]]), found.notes)
                results.save(RESULTS, head, found.rows)
    return 0 if found.rows and not found.notes and all(row["right"] for row in found.rows) else 1


def _run(case: Case, device: str, deadline_s: float, found: Found) -> None:
    folder = Path(tempfile.mkdtemp(prefix="sglang-reshard-one-gpu-"))
    job = Job(case, (), Effort(), device, str(folder))
    try:
        module = "host_cache" if case.kind == HOST_CACHE_CASE.kind else "rank"
        launcher.run_ranks(f"benchmark.one_gpu.{module}", job, time.monotonic() + deadline_s, lambda: None)
    except ReshardError as error:
        print(error, file=sys.stderr)
        found.notes.append(f"{case.kind}: {str(error).splitlines()[0]}")
    finally:
        seen = folder / "seen.json"
        rows: list[dict[str, Any]] = msgspec.json.decode(seen.read_bytes()) if seen.exists() else []
        shutil.rmtree(folder, ignore_errors=True)
    found.rows += rows
    for row in rows:
        print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
