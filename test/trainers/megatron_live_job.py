"""What the trainer ranks of test_megatron_live.py do: they have a Megatron-Core model, and rank 0 an engine, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmark.reference import greedy_tokens
from sglang_reshard.patches.sound_weights import SERVE_DUMMY
from sglang_reshard.verl.megatron import Megatron
from support import megatron_bridge
from support.live_engines import NEW_TOKENS, PROMPTS, greedy, live_digests, live_engine
from support.megatron_models import Case, export, load, logits, megatron_models, parallel, reference


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates, the engine's digests and tokens after each, and what transformers says of the checkpoints."""
    megatron_bridge.install()
    folder, case, generates = Path(job["folder"]), Case(**job["case"]), job["generates"]
    exported = {version: export(folder, case, version) for version in ("1", "2")}
    dist.barrier()
    os.environ[SERVE_DUMMY] = "1"  # what it says before the first update is compared, too
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    options = {"bucket_bytes": 1 << 20, "load_format": "dummy", "skip_tokenizer_init": True, **job["engine"]}
    engine = live_engine(mesh, folder / "1", **options)

    def tokens() -> list[list[int]]:
        return greedy(engine) if generates else []

    source, hf_config = Megatron(dist.get_rank(), dist.get_world_size()), reference(case).config
    seen: dict[str, Any] = {"reports": [], "digests": [], "tokens": [tokens()], "expected": [], "logits": 0}
    with parallel(case):
        models = megatron_models(case, exported["1"])
        bridge = megatron_bridge.Bridge(case.tied, job["both_tied"])
        trainer = megatron_bridge.training_engine(models, hf_config, bridge)
        for version in ("1", "2"):
            load(case, models, exported[version])
            seen["logits"] += same_logits(case, models, version)
            given = source.tensors(trainer)
            assert not copied(given, models)
            report = engine.update_weights_from_tensor(given, weight_version=version, partial=True)
            seen["reports"].append(report.as_dict())
            seen["digests"].append(live_digests(engine, folder / f"digests-{version}"))
            seen["tokens"].append(tokens())
            if generates and dist.get_rank() == 0:
                seen["expected"].append(greedy_tokens(folder / version, PROMPTS, NEW_TOKENS, "float32")[0])
    engine.shutdown()
    return seen


def copied(given: list[tuple[str, torch.Tensor, Any]], models: list[Any]) -> list[str]:
    """The checkpoint tensors that are not views of a live parameter."""
    live = {parameter.untyped_storage().data_ptr() for model in models for parameter in model.parameters()}
    return [name for name, t, _ in given if t.numel() and t.untyped_storage().data_ptr() not in live]


def same_logits(case: Case, models: list[Any], version: str) -> bool:
    """Whether Megatron-Core's logits were compared with transformers', which the last pipeline stage can do."""
    tokens = torch.arange(16).view(2, 8)
    ours = logits(case, models, tokens)
    if ours is None:
        return False
    model = reference(case, seed=int(version))
    with torch.no_grad():
        torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-4, atol=1e-4)
    return True
