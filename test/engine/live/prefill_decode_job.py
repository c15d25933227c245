"""What the trainer of test_prefill_decode.py does: updates a prefill and a decode engine in one update."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from demo import tiny_model
from demo.trainer import Trainer
from oracle.digests import LOADER, read_live_digests
from sglang_reshard import MultiEngineSender
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.protocol.session import Session
from sglang_reshard.testing import cpu_host
from support import nixl_env
from support.servers import free_port

MODES = ("prefill", "decode")


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """The live digests of both engines, by mode, and their versions."""
    # Processes that are spawned have the same path.
    sys.path[:0] = [str(Path(nixl_env.__file__).parent / "nixl_in_host_memory"), str(nixl_env.FOLDER)]
    folder = Path(job["folder"])
    model = folder / "model"
    tiny_model.save(model, 1, 1)
    cpu_host.activate(1)  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end

    bootstrap = free_port()
    engines = {}
    for mode in MODES:
        arguments = cpu_host.engine_arguments(
            disaggregation_mode=mode,
            disaggregation_transfer_backend="nixl",
            disaggregation_bootstrap_port=bootstrap,
        )
        with without_torchrun_variables():
            engines[mode] = Engine(
                model_path=str(model), load_format="dummy", dtype="float32", custom_weight_loader=[LOADER], **arguments
            )
    trainer = Trainer(tiny_model.config(1, 1), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    session = Session.host()
    sender = MultiEngineSender(session.address, trainer_rank=0, global_ranks=(0,), timeout_s=180)
    sender.set_engines({mode: engine.update_weights_distributed for mode, engine in engines.items()})
    live = []
    for number in range(2):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.5)
        sender.update(trainer.model, weight_version=str(number), verify="full")
        live.append({m: read_live_digests(e, folder / f"{m}-{number}")[0] for m, e in engines.items()})
        trainer.save_checkpoint(folder / f"checkpoint-{number}")
    versions = {m: e.tokenizer_manager.server_args.weight_version for m, e in engines.items()}
    sender.close()
    session.end(1)
    for engine in engines.values():
        end(engine)
    return {"live": live, "versions": versions}
