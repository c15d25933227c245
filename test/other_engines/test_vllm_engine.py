"""A whole vLLM engine: after an update its workers have the weights of vLLM's own `reload_weights`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.tiny_qwen3 import tiny_qwen3
from support.vllm_env import needs_vllm, run_job

JOB = Path(__file__).with_name("vllm_engine_job.py")
UNPACKED = "support.vllm_worker.UnpackedWorker"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[str]:
    """The engine starts on the first, and is updated to the others."""
    folders = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("checkpoint")
        AutoModelForCausalLM.from_config(tiny_qwen3()).to(torch.bfloat16).save_pretrained(folder)
        folders.append(str(folder))
    return folders


@needs_vllm
def test_the_workers_have_the_weights_of_vllm_s_own_reload(checkpoints, tmp_path):
    start, *updates = checkpoints
    arguments = {"start": start, "checkpoints": updates, "extension": UNPACKED, "tp_size": 2, "reload": True}
    told, other = run_job(JOB, 2, arguments, tmp_path)
    for update, reload in zip(told["updates"], told["reloads"], strict=True):
        assert len(update["digests"]) == 2
        assert update["digests"] == reload["digests"]
        assert update["tokens"] == reload["tokens"]
        assert (update["transport"], update["kept"]) == ("ipc", [])
    first, second = told["updates"]
    assert first["digests"][0] != second["digests"][0]
    assert first["tokens"] != second["tokens"]
    assert "model.norm.weight is not written by the loader" in told["error"]
    assert told["error"].startswith("EngineRefused")
    assert other["error"] == told["error"]
    assert told["after_refusal"] == {key: second[key] for key in ("digests", "tokens")}


@needs_vllm
def test_packed_weights_are_refused_before_anything_is_written(checkpoints, tmp_path):
    extension = "sglang_reshard.extras.vllm.worker.ReshardWorker"
    start, *updates = checkpoints
    arguments = {"start": start, "checkpoints": updates, "extension": extension, "tp_size": 1, "reload": False}
    told, _ = run_job(JOB, 2, arguments, tmp_path)
    assert told["updates"] == []
    assert "packed copy of its weight" in told["error"]
