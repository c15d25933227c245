"""A trainer rank of one run: `python -m sglang_reshard.selftest.rank JOB`, with torch's variables.

JOB is the JSON of `Job`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch.distributed as dist

from sglang_reshard.selftest import engines, models
from sglang_reshard.selftest.events import EventWriter
from sglang_reshard.selftest.job import Job
from sglang_reshard.selftest.steps import Steps
from sglang_reshard.selftest.trainer import Trainer, join


def main(job: Job) -> None:
    run, model = job.run, Path(job.folder) / "model"
    device = join(run)
    events = EventWriter(Path(job.events) if dist.get_rank() == 0 else None)
    engine = None
    if dist.get_rank() == 0:
        models.save(run.model, model, run.source, run.target)
        with events.phase(f"start an engine: {run.target}, {run.dtype}, on dummy weights", 12 + 5 * run.target.ranks):
            engine = engines.start(run, model)
    dist.barrier()
    try:
        with events.phase(f"make the model, shard it: {run.source}"):
            trainer = Trainer(models.config(model), run.source, device, models.trainer_dtype(run.model))
        Steps(job, trainer, engine, device).take()
    finally:
        if engine is not None:
            from sglang_reshard.patches.engine import end

            end(engine)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
