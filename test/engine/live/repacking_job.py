"""What the trainer of test_repacking_engines.py does: updates an engine that repacks what it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmark.demo import tiny_model
from benchmark.demo.trainer import Trainer
from sglang_reshard import Snapshots, WeightSender
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.testing import cpu_host
from tools.oracle.digests import LOADER, read_live_digests

OPTIONS: tuple[dict[str, Any], ...] = ({"verify": "full"}, {"staged": True}, {})


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """The live digests after each update, those of an engine started on each checkpoint, and bytes of memory."""
    folder = Path(job["folder"])
    model = folder / "model"
    tiny_model.save(model, 1, 2)
    cpu_host.activate(2)  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end

    def started(path: Path, load_format: str) -> Engine:
        arguments = cpu_host.engine_arguments(tp_size=2, dtype="bfloat16", **job["engine"])
        with without_torchrun_variables():
            return Engine(model_path=str(path), load_format=load_format, custom_weight_loader=[LOADER], **arguments)

    engine = started(model, "dummy")
    trainer = Trainer(tiny_model.config(1, 2), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    trainer.model.to(torch.bfloat16)
    sender = WeightSender.over(dist.group.WORLD, engine.update_weights_distributed, timeout_s=180)
    snapshots = Snapshots(sender, folder, copy_from=model)
    live, reports = [], []
    for number, options in enumerate(OPTIONS):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.5)
        reports.append(sender.update(trainer.model, weight_version=str(number), **options))
        live.append(read_live_digests(engine, folder / f"live-{number}"))
        snapshots.write(trainer.model, f"checkpoint-{number}")
    sender.close()
    end(engine)

    cold = []
    for number in job["cold"]:
        checkpoint = folder / f"checkpoint-{number}"
        engine = started(checkpoint, "auto")
        cold.append(read_live_digests(engine, folder / f"cold-{number}"))
        end(engine)
    extra = [max(rank.peak_extra_bytes for rank in report.engine_ranks) for report in reports]
    return {"live": live, "cold": cold, "extra_bytes": extra}
