"""What the trainer ranks of test_deepspeed_live.py do: ZeRO-3 trains a transformers model, and rank 0 has an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3ForCausalLM

from benchmark.demo.reference import greedy_tokens
from sglang_reshard import VerlEngine
from sglang_reshard.testing import cpu_host
from support.deepspeed_env import import_deepspeed
from support.tiny_qwen3 import tiny_qwen3
from tools.oracle.digests import LOADER, read_live_digests

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 8
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, "overlap_comm": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
}
CONFIG = tiny_qwen3()


class Job:
    """ZeRO-3's engine, SGLang's, and what is seen of both."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self.deepspeed = import_deepspeed(dist.get_rank())
        torch.manual_seed(0)
        self.trainer, *_ = self.deepspeed.initialize(model=Qwen3ForCausalLM(CONFIG), config=ZERO3)
        self.save("1")
        cpu_host.activate(job["engine"]["tp_size"])
        self.engine = VerlEngine(
            device_mesh_cpu=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
            timeout_s=180,
            model_path=str(self.folder / "1"),
            load_format="dummy",
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
            log_level="warning",
            **cpu_host.engine_arguments(**job["engine"]),
        )

    def step(self) -> None:
        tokens = torch.arange(24).view(2, 12) + dist.get_rank()
        self.trainer.backward(self.trainer(input_ids=tokens, labels=tokens).loss)
        self.trainer.step()

    def save(self, version: str) -> None:
        """The checkpoint of what DeepSpeed itself gathers, by transformers."""
        with self.deepspeed.zero.GatheredParameters(list(self.trainer.module.parameters())):
            state = {name: p.detach().clone() for name, p in self.trainer.module.named_parameters()}
        if dist.get_rank() == 0:
            with torch.device("meta"):
                unsharded = Qwen3ForCausalLM(CONFIG)
            unsharded.save_pretrained(self.folder / version, state_dict=state)
        dist.barrier()

    def look(self, version: str) -> dict[str, Any]:
        outputs = self.engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        )
        first = dist.get_rank() == 0
        return {
            "tokens": [output["output_ids"] for output in outputs],
            "digests": read_live_digests(self.engine.engine, self.folder / f"digests-{version}") if first else [],
            "expected": greedy_tokens(self.folder / version, PROMPTS, NEW_TOKENS, "float32")[0] if first else [],
        }


def three_versions(job: dict[str, Any]) -> list[dict[str, Any]]:
    """An update before the first optimizer step, and after each of two."""
    run, seen = Job(job), []
    for version in ("1", "2", "3"):
        if version != "1":
            run.step()
            run.save(version)
        report = run.engine.update_weights_from_tensor(run.trainer.module, weight_version=version)
        seen.append({"report": report.as_dict(), **run.look(version)})
    run.engine.shutdown()
    return seen
