"""What the trainer of test_odd_engines.py does: updates an engine that cannot take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from demo import tiny_model
from demo.trainer import Trainer
from oracle.digests import LOADER, read_live_digests
from sglang_reshard import WeightSender
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.testing import cpu_host
from support.refusals import refusal_of


def update_in_vain(job: dict[str, Any]) -> dict[str, Any]:
    """Two refused updates, what `check_installed` says, and the live weights before and after."""
    folder = Path(job["folder"])
    model = folder / "model"
    tiny_model.save(model, 1, 1)
    cpu_host.activate(1)  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import check_installed, end

    with without_torchrun_variables():
        engine = Engine(
            model_path=str(model),
            load_format="dummy",
            dtype=job["dtype"],
            custom_weight_loader=[LOADER],
            **cpu_host.engine_arguments(**job["engine"]),
        )

    before = read_live_digests(engine, folder / "before")
    trainer = Trainer(tiny_model.config(1, 1), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    sender = WeightSender.over(dist.group.WORLD, engine.update_weights_distributed, timeout_s=60)

    def update() -> None:
        sender.update(trainer.model, weight_version="1")

    seen = {
        "told": [refusal_of(update), refusal_of(update), refusal_of(lambda: check_installed(engine))],
        "before": before,
        "after": read_live_digests(engine, folder / "after"),
        "version": engine.tokenizer_manager.server_args.weight_version,
    }
    sender.close()
    end(engine)
    return seen
