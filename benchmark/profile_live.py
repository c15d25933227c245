"""The cases of `benchmark.profile` whose engine is SGLang's: `torchrun -m benchmark.profile_live JOB` runs a rank.

The steps of engine ranks are timed in SGLang's own schedulers, which a custom weight loader reaches.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from benchmark import launcher, paths, trainer
from benchmark.cases import QUICK_CASES, Effort
from benchmark.results import Rows
from benchmark.weights import Weights
from sglang_reshard.selftest.digests import read_live_digests, write_json

if TYPE_CHECKING:
    from benchmark.profile import Updates, Watch

LOADER = "benchmark.profile_live.watch_engine_rank"
CASES = {f"live-{kind}": case for kind, case in zip(("dense", "moe"), QUICK_CASES, strict=True)}
_watches: list[Watch] = []  # of this engine rank


def watch_engine_rank(model: torch.nn.Module, named_tensors: Any) -> None:
    """A custom weight loader: every rank writes what its watch has seen, and begins one the first time."""
    from benchmark.profile import Watch

    if not _watches:
        _watches.append(Watch("engine"))
    write_json(_watches[0].updates, named_tensors)


def run(name: str) -> Rows:
    from benchmark.profile import rows_of

    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="sglang-reshard-profile-", ignore_cleanup_errors=True) as temporary:
        folder, job = Path(temporary), trainer.Job(case, ("ipc",), Effort(), "cpu", temporary)
        launcher.run_ranks("benchmark.profile_live", job, 600.0)
        trainers = [msgspec.json.decode((folder / f"trainer-{rank}").read_bytes()) for rank in range(case.trainers)]
        engines = msgspec.json.decode((folder / "engine").read_bytes())
    return rows_of(f"{case.name}, SGLang, ipc", {"trainer": trainers, "engine": engines})


def main(job: trainer.Job) -> None:
    trainer.join(job.device, job.case.trainers)
    with trainer.engine_and_weights(job, LOADER) as (engine, weights):
        _profile(job, engine, weights)


def _profile(job: trainer.Job, engine: Any, weights: Weights) -> None:
    from benchmark.profile import UPDATES, WARMUPS, Watch

    folder = Path(job.folder)
    if engine is not None:
        read_live_digests(engine, folder / "watches", LOADER)
    watch, path = Watch("trainer"), paths.make("ipc", engine, job.case.engine_tp)
    named = weights.named()
    for _ in range(1 + WARMUPS + UPDATES):
        dist.barrier()
        path.update(named)
    (folder / f"trainer-{dist.get_rank()}").write_bytes(msgspec.json.encode(watch.updates))
    if engine is not None:
        seen: list[Updates] = read_live_digests(engine, folder / "watches", LOADER)
        (folder / "engine").write_bytes(msgspec.json.encode(seen))
    path.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=trainer.Job))
