"""What the trainer ranks of test_images.py do: they train a vision-language model under FSDP2, by its own names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import Qwen3VLForConditionalGeneration

from sglang_reshard import VerlEngine
from sglang_reshard.patches.stock_weights import SERVE_DUMMY
from sglang_reshard.testing import cpu_host
from support.tiny_qwen3_vl import PROMPT, greedy_answer
from tools.oracle.digests import LOADER, read_live_digests

NEW_TOKENS = 8


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """What the engine says of an image before and after each update, twice as it caches what it has seen in it."""
    folder, image, sizes = Path(job["folder"]), Path(job["image"]), job["engine"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cpu_host.activate(sizes["tp_size"])
    engine = VerlEngine(
        device_mesh_cpu=mesh,
        timeout_s=180,
        model_path=str(folder / "1"),
        load_format="dummy",
        custom_weight_loader=[LOADER],
        log_level="warning",
        mm_attention_backend="sdpa",
        **cpu_host.engine_arguments(**sizes),
    )
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder / "1")
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(layer, mesh=mesh)

    os.environ[SERVE_DUMMY] = "1"  # what it says first is compared, too

    def said() -> list[int]:
        options = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        output = engine.generate(prompt=PROMPT, image_data=str(image), sampling_params=options)
        return list(output["output_ids"])

    seen: dict[str, Any] = {"tokens": [said()], "reference": [], "digests": []}
    for version in ("1", "2"):
        trained = Qwen3VLForConditionalGeneration.from_pretrained(folder / version).state_dict()
        for name, tensor in model.state_dict().items():
            placed = distribute_tensor(trained[name], mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(placed.to_local())
        engine.update_weights_from_tensor(model.state_dict().items(), weight_version=version)
        seen["tokens"] += [said(), said()]
        if dist.get_rank() == 0:
            seen["reference"].append(greedy_answer(folder / version, image, NEW_TOKENS))
        if engine.engine is not None:
            seen["digests"].append(read_live_digests(engine.engine, folder / f"digests-{version}"))
    engine.shutdown()
    return seen
