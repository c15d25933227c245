"""What the trainer ranks of test_fresh_engines.py do: one engine is updated, one starts on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models_job import sharded
from oracle.digests import LOADER, read_live_digests
from sglang_reshard import VerlEngine
from sglang_reshard.testing import cpu_host

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 6


def beside_a_fresh_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Returns what an engine says before and after two updates, and what one says that starts on checkpoint 2."""
    folder, sizes = Path(job["folder"]), job["engine"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cpu_host.activate(sizes["tp_size"])

    def engine(version: str, load_format: str) -> VerlEngine:
        return VerlEngine(
            device_mesh_cpu=mesh,
            timeout_s=90,
            model_path=str(folder / version),
            load_format=load_format,
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
            log_level="warning",
            **cpu_host.engine_arguments(**sizes),
        )

    def look(of: VerlEngine, name: str) -> dict[str, Any]:
        outputs = of.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
        digests = [] if of.engine is None else read_live_digests(of.engine, folder / f"digests-{name}")
        logprobs = [[p for p, *_ in o["meta_info"]["output_token_logprobs"]] for o in outputs]
        return {"tokens": [o["output_ids"] for o in outputs], "logprobs": logprobs, "digests": digests}

    updated = engine("1", "dummy")
    seen: dict[str, Any] = {"dummy": look(updated, "dummy")}
    state = sharded(folder / "1", mesh)
    for version in ("1", "2"):
        for name, tensor in sharded(folder / version, mesh).items():  # in place, as an optimizer writes
            state[name].to_local().copy_(tensor.to_local())
        options = {"staged": True} if version == "2" and job["staged"] else {}
        updated.update_weights_from_tensor(state.items(), weight_version=version, verify="full", **options)
        seen[version] = look(updated, version)
    updated.shutdown()
    fresh = engine("2", "auto")
    seen["fresh"] = look(fresh, "fresh")
    fresh.shutdown()
    return seen
