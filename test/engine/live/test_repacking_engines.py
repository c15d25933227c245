"""A live engine that quantizes what it has loaded: updated, it has what an engine has that starts on the weights.

It starts on a snapshot of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_reshard import Snapshots, WeightSender
from sglang_reshard.cli.layouts import Source
from sglang_reshard.selftest import tiny_model
from sglang_reshard.selftest.digests import read_live_digests
from sglang_reshard.selftest.trainer import Trainer
from support.live_engines import stock_engine
from support.trainers import run_trainers

OPTIONS: tuple[dict[str, Any], ...] = ({"verify": "full"}, {"staged": True}, {})
ENGINE = {"tp_size": 2, "dtype": "bfloat16", "quantization": "fp8"}
pytestmark = [pytest.mark.engine]


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """The live digests after each update, and those of an engine started on the last checkpoint."""
    folder, live = Path(job["folder"]), []
    tiny_model.save(folder / "model", 1, 2)
    trainer = Trainer(tiny_model.config(1, 2), Source())
    trainer.model.to(torch.bfloat16)
    with stock_engine(folder / "model", load_format="dummy", **ENGINE) as engine:
        sender = WeightSender.over(dist.group.WORLD, engine.update_weights_distributed, timeout_s=180)
        for number, options in enumerate(OPTIONS):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(1.5)
            sender.update(trainer.model, weight_version=str(number), **options)
            live.append(read_live_digests(engine, folder / f"live-{number}"))
        Snapshots(sender, folder, copy_from=folder / "model").write(trainer.model, "last")
        sender.close()
    with stock_engine(folder / "last", **ENGINE) as engine:
        return {"live": live, "cold": read_live_digests(engine, folder / "cold")}


def test_an_engine_that_quantizes_to_fp8_has_what_a_start_on_the_weights_leaves(tmp_path: Path) -> None:
    (seen,) = run_trainers(1, updates, tmp_path)
    first, staged, last = seen["live"]
    assert last == seen["cold"]
    weights = "model.layers.0.self_attn.qkv_proj.weight"
    assert len({found[0][weights] for found in (first, staged, last)}) == 3, "each update brought other weights"
