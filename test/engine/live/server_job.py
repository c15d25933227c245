"""What the trainer ranks of test_server.py do: a server that somebody else started, reached by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sglang_reshard import WeightSender
from sglang_reshard.demo import text, tiny_model
from sglang_reshard.demo.reference import greedy_tokens
from sglang_reshard.demo.trainer import Trainer
from sglang_reshard.http_send import http_send

PROMPTS = [[5, 6, 7, 8], [100, 200]]


def update_a_server(job: dict[str, Any]) -> dict[str, Any]:
    url, folder = job["url"], Path(job["folder"])
    admin = {"Authorization": f"Bearer {job['key']}"}

    def tokens() -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": text.NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": PROMPTS, "sampling_params": sampling}
        answers = httpx.post(f"{url}/generate", json=body, headers=admin, timeout=60).json()
        return [answer["output_ids"] for answer in answers]

    def control(path: str, body: dict[str, str]) -> None:
        if rank == 0:
            httpx.post(f"{url}/{path}", json=body, headers=admin, timeout=60).raise_for_status()
        dist.barrier()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    trainer = Trainer(tiny_model.config(ranks, job["target_tp"]), mesh)
    trainer.save_checkpoint(folder / "checkpoint")
    dist.barrier()
    send = http_send(url, api_key=job["key"], timeout_s=60) if rank == 0 else None
    sender = WeightSender.over(mesh.get_group(), send, timeout_s=60)
    before = tokens()
    report = sender.update(trainer.model.named_parameters(), weight_version="from afar").as_dict()
    after = tokens()
    control("pause_generation", {"mode": "abort"})
    paused = sender.update(trainer.model.named_parameters(), weight_version="while paused").as_dict()
    control("continue_generation", {})
    after_pause = tokens()
    sender.close()
    expected, _ = greedy_tokens(folder / "checkpoint", PROMPTS, text.NEW_TOKENS, "float32")
    return {
        "before": before,
        "after": after,
        "after_pause": after_pause,
        "expected": expected,
        "report": report,
        "paused": paused,
    }
