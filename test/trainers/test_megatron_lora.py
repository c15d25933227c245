"""LoRA adapters that Megatron-Core models train, as Megatron-Bridge applies them: what is read, and what is served.

Shards of all ranks, put together, are compared with what Megatron-Bridge itself exports, bit for bit; what a real
engine says of prompts with Megatron-Core's log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sglang_reshard.sources import megatron_adapter_config, megatron_adapter_tensors
from support.live_engines import LORA, MODULES, PROMPTS, live_engine
from support.log_probs import log_probs, served_log_probs
from support.megatron_bridge_env import FOLDERS
from support.scripts import answers
from support.trainer_rows import shown
from support.trainers import run_trainers


def two_versions(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates of an adapter; what the engine says of the prompts after each, and what Megatron-Core says."""
    from support import megatron_lora
    from support.megatron_models import Case, checkpoint, logits, megatron_models, parallel, reference

    folder, case = Path(job["folder"]), Case(**job["case"])
    base = reference(case)
    if dist.get_rank() == 0:
        base.save_pretrained(folder / "model")
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    options = {
        "skip_tokenizer_init": True,
        "lora_target_modules": MODULES,
        "tp_size": job["tp_size"],
        "dtype": "float32",
    }
    engine = live_engine(mesh, folder / "model", **LORA, **options)
    seen: dict[str, Any] = {
        "reports": [],
        "served": [],
        "expected": [],
        "base": served_log_probs(engine, PROMPTS, None),
    }
    with parallel(case):
        models = megatron_models(case, checkpoint(base))
        megatron_lora.adapt(models, dim=4, alpha=8)
        policy = engine.lora_adapter("policy", megatron_adapter_config(models))
        for version in (1, 2):
            megatron_lora.train(models, seed=10 * version + dist.get_rank())
            report = policy.update(megatron_adapter_tensors(models), partial=True, weight_version=str(version))
            seen["reports"].append(report.as_dict())
            seen["served"].append(served_log_probs(engine, PROMPTS, "policy"))
            found = [logits(case, models, torch.tensor([prompt])) for prompt in PROMPTS]
            said = [log_probs(one[0], prompt) for one, prompt in zip(found, PROMPTS, strict=True) if one is not None]
            seen["expected"].append(said)
    engine.shutdown()
    return seen


RANKS = 4
OF_ALL = {"peft": "LoRA", "options": {"dim": 4, "alpha": 16}}
ATTENTION = {"peft": "LoRA", "options": {"dim": 4, "alpha": 16, "target_modules": ["linear_qkv", "linear_proj"]}}
CANONICAL = {"peft": "CanonicalLoRA", "options": {"dim": 4, "alpha": 16}}
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
CASES = {
    "tp2": {"kind": "qwen3", "tp": 2, **OF_ALL},
    "tp2 pp2": {"kind": "llama", "tp": 2, "pp": 2, **OF_ALL},
    "tp2 pp2 vp2": {"kind": "qwen2", "tp": 2, "pp": 2, "vp": 2, "layers": 4, **OF_ALL},
    "tp4 inside a group": {"kind": "qwen3", "tp": 4, **OF_ALL},
    "tp2, one adapter for each projection": {"kind": "qwen3", "tp": 2, **CANONICAL},
    "tp2 pp2, attention under experts": {"kind": "qwen3_moe", "tp": 2, "pp": 2, **ATTENTION},
}
REFUSED = {
    "DoRA": ({"kind": "qwen3", "tp": 2, "peft": "DoRA", "options": {"dim": 4}}, "SGLang does not serve DoRA"),
    "experts": ({"kind": "qwen3_moe", "tp": 2, **OF_ALL}, "of dense decoder layers are supported"),
}


@pytest.fixture(scope="module")
def exported():
    if not FOLDERS["0.3.1"].exists():
        pytest.skip("Megatron-Bridge is not installed: make setup-bridge")
    job = Path(__file__).parent / "megatron_lora_bridge_job.py"
    return answers(job, {**CASES, **{name: case for name, (case, _) in REFUSED.items()}})


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_shards_put_together_are_what_megatron_bridge_exports(exported, name, record_property):
    layers = CASES[name].get("layers", 2)
    modules = ALL if CASES[name] | ATTENTION != CASES[name] else ["k_proj", "o_proj", "q_proj", "v_proj"]
    for rank, found in enumerate(exported[name]):
        assert found["wrong"] == [], f"trainer rank {rank}"
        assert found["tensors"] == 2 * layers * len(modules)
        assert found["config"] == {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": modules}
    trainer = f"Megatron-Bridge 0.3.1, {CASES[name]['peft']}, {CASES[name]['kind']} {name}"
    record_property("trainer", shown(trainer, "megatron_adapter_tensors", "any", "read"))


@pytest.mark.sweep
@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused(exported, name):
    for found in exported[name]:
        assert REFUSED[name][1] in found["refused"]


@pytest.mark.engine
@pytest.mark.sweep
@pytest.mark.usefixtures("forks")
def test_an_engine_serves_the_adapter(tmp_path: Path, record_property: Any) -> None:
    sizes = {"hidden": 128, "heads": 8, "groups": 4, "head": 32, "mlp": 192, "vocabulary": 509, "positions": 4096}
    case = {"kind": "qwen3", "tp": 2, "pp": 2, **sizes}
    ranks = run_trainers(RANKS, two_versions, tmp_path, case=case, tp_size=2)
    of_last_stage = [rank for rank in ranks if all(rank["expected"])]
    assert len(of_last_stage) == 2
    base = values(ranks[0]["base"])
    for version in (0, 1):
        served = values(ranks[0]["served"][version])
        for rank in of_last_stage:
            torch.testing.assert_close(served, values(rank["expected"][version]), rtol=1e-4, atol=1e-4)
        assert (served - base).abs().max() > 0.1
        for engine_rank in ranks[0]["reports"][version]["engine_ranks"]:
            assert engine_rank["received_bytes"] == engine_rank["least_bytes"] > 0
    first, second = map(values, ranks[0]["served"])
    assert (first - second).abs().max() > 0.1
    prepared, ready = (report["seconds"] for report in ranks[0]["reports"])
    assert "plan" in prepared
    assert "plan" not in ready
    record_property(
        "trainer", shown("Megatron-Core, qwen3 tp2 pp2, LoRA", "megatron_adapter_tensors", "auto", "run", 1.0)
    )


def values(of_prompts: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for prompt in of_prompts for value in prompt])
