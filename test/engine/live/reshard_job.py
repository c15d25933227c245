"""A trainer of the demonstration's model, and an engine that all of its ranks start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmark.reference import greedy_tokens
from sglang_reshard import VerlEngine
from sglang_reshard.cli.layouts import Source
from sglang_reshard.selftest import text, tiny_model
from sglang_reshard.selftest.trainer import Trainer
from support.live_engines import PROMPTS, greedy, live_digests, live_engine
from support.refusals import refusal_of


class Job:
    """One trainer, one engine, and what was seen, step by step."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self.job = job
        self.rank = dist.get_rank()
        world = dist.get_world_size()
        self.model_path = self.folder / "model"
        tp, target_tp = job["source_tp"], job["target_tp"]
        if self.rank == 0:
            tiny_model.save(self.model_path, tp, target_tp)
        dist.barrier()
        self.trainer = Trainer(tiny_model.config(tp, target_tp), Source(fsdp=world // tp, tp=tp))
        self.tokenizer = tiny_model.tokenizer()
        all_ranks = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
        self.engine = self.start(all_ranks)
        self.seen: dict[str, Any] = {}

    def start(self, mesh: DeviceMesh) -> VerlEngine:
        names = ("transport", "bucket_bytes", "dtype", "disable_overlap_schedule")
        options = {name: self.job[name] for name in names if name in self.job}
        return live_engine(mesh, self.model_path, tp_size=self.job["target_tp"], load_format="dummy", **options)

    def update(self, version: str, **options: Any) -> dict[str, Any]:
        return self.engine.update_weights_from_tensor(
            self.trainer.model.named_parameters(), weight_version=version, **options
        ).as_dict()

    def refusal(self, version: str | None, **options: Any) -> list[str]:
        """How an update that must not succeed is refused."""
        named = options.pop("named", None) or self.trainer.model.named_parameters()
        return refusal_of(lambda: self.engine.update_weights_from_tensor(named, weight_version=version, **options))

    def step_and_save(self, version: str) -> None:
        self.trainer.step(int(version))
        self.trainer.save_checkpoint(self.checkpoint(version))
        dist.barrier()

    def checkpoint(self, version: str) -> Path:
        return self.folder / f"checkpoint-{version}"

    def tokens(self) -> list[list[int]]:
        return greedy(self.engine, PROMPTS, text.NEW_TOKENS)

    def expected_tokens(self, version: str) -> list[list[int]]:
        return greedy_tokens(self.checkpoint(version), PROMPTS, text.NEW_TOKENS, "float32")[0]

    def live_digests(self, name: str) -> list[dict[str, str]]:
        return live_digests(self.engine, self.folder / f"digests-{name}")
