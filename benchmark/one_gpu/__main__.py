"""Updates a real SGLang engine that shares one GPU with its trainer ranks: `python -m benchmark.one_gpu`.

It needs SGLang and one GPU. The engine has one rank, CUDA graphs and SGLang's memory saver; the trainer ranks have FSDP2
shards. Every weight of the engine is compared with a stock load from disk, and log-probabilities with transformers.
On a host without a GPU, `--rehearse` runs the same steps with a tiny model and prints what it sees.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from benchmark import results
from benchmark.environment import environment
from benchmark.models import Qwen3
from benchmark.one_gpu.job import CASES, Job
from demo import children
from sglang_reshard.errors import ReshardError

RESULTS = results.FOLDER / "one-gpu.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.one_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on a host without a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="for each case")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("this host has no GPU; pass --rehearse")
    rows = []
    for name, (model, trainers) in CASES.items():
        if options.only in name:
            rows += _run(name, TINY[model.experts > 0] if options.rehearse else model, trainers, options)
            if not options.rehearse:
                results.save(
                    options.out, results.header(" ".join(["python -m benchmark.one_gpu", *sys.argv[1:]]), []), rows
                )
    return 0 if rows and all(row["right"] for row in rows) else 1


TINY = {
    False: Qwen3(2, 64, 128, 4, 4, 16, 512),
    True: Qwen3(2, 64, 64, 4, 4, 16, 512, experts=4, tied=False),
}


def _run(name: str, model: Qwen3, trainers: int, options: argparse.Namespace) -> list[dict[str, object]]:
    folder = Path(tempfile.mkdtemp(prefix="sglang-reshard-one-gpu-"))
    job = Job(name, model, trainers, "cpu" if options.rehearse else "cuda", str(folder))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trainers}",
               "-m", "benchmark.one_gpu.rank", msgspec.json.encode(job).decode()]  # fmt: skip
    variables = environment(folder, 1, job.device, "qwen3", "qwen3_moe")
    try:
        children.run(command, variables, folder / "log", time.monotonic() + options.deadline_s, lambda: None)
        rows: list[dict[str, object]] = msgspec.json.decode((folder / "seen.json").read_bytes())
    except ReshardError:
        print((folder / "log").read_text(errors="replace"), file=sys.stderr, flush=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        print(msgspec.json.encode(row).decode(), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
