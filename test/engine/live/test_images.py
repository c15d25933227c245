"""A live vision-language model: what it says of an image is what transformers says with the new weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import Qwen3VLForConditionalGeneration

from sglang_reshard.patches.sound_weights import SERVE_DUMMY
from support.live_engines import live_digests, live_engine
from support.tiny_qwen3_vl import PROMPT, greedy_answer, write_image, write_qwen3_vl
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

NEW_TOKENS = 8


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """What the engine says of an image before and after each update, twice as it caches what it has seen in it."""
    folder, image, sizes = Path(job["folder"]), Path(job["image"]), job["engine"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    engine = live_engine(mesh, folder / "1", load_format="dummy", mm_attention_backend="sdpa", **sizes)
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
        seen["digests"].append(live_digests(engine, folder / f"digests-{version}"))
    engine.shutdown()
    return seen


pytestmark = [pytest.mark.engine]


def test_an_image_is_seen_with_the_new_weights(tmp_path: Path) -> None:
    checkpoints = [str(write_qwen3_vl(tmp_path / version, int(version))) for version in ("1", "2")]
    image, engine = write_image(tmp_path / "image.png"), {"tp_size": 2, "dtype": "float32"}
    seen = run_trainers(2, two_updates, tmp_path, engine=engine, image=str(image))[0]
    before, first, again, second, once_more = seen["tokens"]
    assert [first, second] == seen["reference"]
    assert (again, once_more) == (first, second), "from its cache"
    assert len({tuple(said) for said in (before, first, second)}) == 3
    expected = stock_digests(checkpoints[0], checkpoints, **engine, ranks=range(2))
    for live, stock in zip(seen["digests"], expected, strict=True):
        assert live == [stock[rank] for rank in range(2)]
