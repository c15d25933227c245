"""ZeRO-3 trains a transformers model on three ranks and updates a real SGLang engine between its optimizer steps.

What every engine rank holds is compared with a stock load of what DeepSpeed itself gathers, what the engine says with
transformers' greedy tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3ForCausalLM

from benchmark.reference import greedy_tokens
from support.deepspeed_env import FOLDER, import_deepspeed
from support.live_engines import NEW_TOKENS, PROMPTS, greedy, live_digests, live_engine
from support.tiny_qwen3 import tiny_qwen3
from support.trainer_rows import shown
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

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
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        options = {"load_format": "dummy", "skip_tokenizer_init": True, **job["engine"]}
        self.engine = live_engine(mesh, self.folder / "1", **options)

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
        expected = (
            greedy_tokens(self.folder / version, PROMPTS, NEW_TOKENS, "float32")[0] if dist.get_rank() == 0 else []
        )
        digests = live_digests(self.engine, self.folder / f"digests-{version}")
        return {"tokens": greedy(self.engine), "digests": digests, "expected": expected}


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


pytestmark = [
    pytest.mark.engine,
    pytest.mark.sweep,
    pytest.mark.skipif(not FOLDER.exists(), reason="DeepSpeed is not installed: make setup-deepspeed"),
]


def test_a_live_engine_follows_zero_3(tmp_path: Path, record_property: Any) -> None:
    engine = {"tp_size": 2, "dtype": "float32"}
    seen, *_ = run_trainers(3, three_versions, tmp_path, engine=engine)
    checkpoints = [tmp_path / version for version in ("1", "2", "3")]
    expected = stock_digests(checkpoints[0], checkpoints, **engine)
    assert [dict(enumerate(version["digests"])) for version in seen] == expected
    assert [version["tokens"] for version in seen] == [version["expected"] for version in seen]
    assert len({str(version["tokens"]) for version in seen}) == 3
    for version in seen:
        ranks = version["report"]["engine_ranks"]
        assert sum(r["received_bytes"] for r in ranks) == sum(r["least_bytes"] for r in ranks) > 0
    record_property("trainer", shown("DeepSpeed ZeRO-3, a live SGLang engine", "the module", "auto", "run", 1.0))
