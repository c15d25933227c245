"""PEFT's options and states, served by one live engine: its log-probabilities are PEFT's own, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, KasaConfig
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3ForCausalLM

from sglang_reshard.errors import ReshardError
from sglang_reshard.sources import adapter_config, adapter_tensors, base_tensors
from support.live_engines import LORA, MODULES, live_engine
from support.log_probs import log_probs, served_log_probs
from support.sglangs import chosen
from support.sweep import sweep
from support.tiny_qwen3 import tiny_qwen3
from support.trainers import run_trainers

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
ROWS = {"target_modules_bd_b": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]}
SERVED: dict[str, dict[str, Any]] = {
    "all modules": {},
    "one layer": {"layers_to_transform": [1]},
    "some modules": {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding, in the slot of the one before": {"target_modules": ["embed_tokens"]},
    "all of one kind": {"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.down_proj"]},
    "MiCA, with dropout": {"init_lora_weights": "mica", "lora_dropout": 0.3},
    "rsLoRA": {"use_rslora": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "KaSA": {"kasa_config": KasaConfig()},
    "BD-LoRA": {"use_bdlora": BdLoraConfig(target_modules_bd_a=["o_proj", "down_proj"], nblocks=2, **ROWS)},
    "keys alone": {"target_modules": ["k_proj"]},
    "queries alone": {"target_modules": ["q_proj"]},
    "up alone": {"target_modules": ["up_proj"]},
}


class Job:
    """An engine with two slots for adapters besides the base model's, and the checkpoint that it started on."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "model"
        torch.manual_seed(0)
        Qwen3ForCausalLM(tiny_qwen3(tie_word_embeddings=False)).float().save_pretrained(self.checkpoint)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        options = {"skip_tokenizer_init": True, "lora_target_modules": ["all"], "dtype": "float32"}
        self.engine = live_engine(mesh, self.checkpoint, **LORA, **options)
        self.adapters = 0

    def base(self) -> Qwen3ForCausalLM:
        return Qwen3ForCausalLM.from_pretrained(self.checkpoint).float()

    def model(self, **options: Any) -> PeftModel:
        """A model whose adapter has been trained a little."""
        torch.manual_seed(1)
        options = {"target_modules": MODULES, "init_lora_weights": False} | options
        model = get_peft_model(self.base(), LoraConfig(r=4, lora_alpha=8, **options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter += 0.05 * torch.randn_like(parameter)
        return model

    def difference(self, model: PeftModel, adapter: str | None) -> float:
        """The largest between log-probabilities of the engine and PEFT's own."""
        with torch.no_grad():
            expected = log_probs(model(torch.tensor([PROMPT])).logits[0], PROMPT)
        (served,) = served_log_probs(self.engine, [PROMPT], adapter)
        return max(abs(a - b) for a, b in zip(served, expected, strict=True))

    def serve(self, model: PeftModel, **options: Any) -> float:
        self.adapters += 1
        name = f"adapter {self.adapters}"
        self.engine.lora_adapter(name, adapter_config(model), **options).update(adapter_tensors(model))
        return self.difference(model, name)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def variants(job: dict[str, Any]) -> dict[str, Any]:
    """Differences of log-probabilities, or what was refused."""
    run = Job(Path(job["folder"]))
    update, model = run.engine.update_weights_from_tensor, run.model()
    seen: dict[str, Any] = {"whole": outcome(lambda: update(model))}
    model.merge_adapter()
    update(base_tensors(model), weight_version="merged")
    seen["merged"] = run.difference(model, None)
    model.unmerge_adapter()
    seen["over merged"] = outcome(lambda: run.serve(model))
    update(base_tensors(model))
    seen["served"] = {name: outcome(lambda o=options: run.serve(run.model(**o))) for name, options in SERVED.items()}
    seen["refused"] = {name: outcome(lambda o=options: run.serve(run.model(**o))) for name, options in REFUSED.items()}
    model.merge_adapter()
    seen["merged over"] = outcome(lambda: update(base_tensors(model)))
    seen["said so"] = outcome(lambda: update(dict(base_tensors(model)), merged=["default"]))
    model.unmerge_adapter()
    seen["after"] = run.serve(model)
    for init in ("pissa", "olora"):
        changed = run.model(init_lora_weights=init)
        seen[init] = outcome(lambda m=changed: run.serve(m))
        seen[f"{init}, with its base"] = run.serve(changed, base=base_tensors(changed))
    run.engine.shutdown()
    return seen


pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("forks")]
CLOSE = 1e-4


@pytest.fixture(scope="module", params=["pinned", sweep("newest")])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with chosen(request.param):
        (found,) = run_trainers(1, variants, tmp_path_factory.mktemp("lora"))
    return found


@pytest.mark.parametrize("name", SERVED)
def test_what_is_plain_lora_is_served(seen: dict[str, Any], name: str) -> None:
    assert seen["served"][name] < CLOSE


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_refused_and_the_engine_serves_on(seen: dict[str, Any], name: str) -> None:
    said = {"KaSA": "Unsupported: kasa_config=", "BD-LoRA": "Unsupported: use_bdlora="}
    assert said.get(name, "SGLang cannot load the LoRA adapter") in seen["refused"][name]
    assert seen["after"] < CLOSE


def test_an_adapter_that_is_merged_is_not_served_on_top(seen: dict[str, Any]) -> None:
    assert seen["merged"] < CLOSE
    for name in ("over merged", "merged over", "said so"):
        assert "the LoRA adapters default are merged into the weights" in seen[name]


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_changed_base_is_sent_in_one_call(seen: dict[str, Any], init: str) -> None:
    assert f"init_lora_weights='{init}' has changed the base weights" in seen[init]
    assert seen[f"{init}, with its base"] < CLOSE


def test_a_whole_peft_model_is_refused_with_what_to_do(seen: dict[str, Any]) -> None:
    assert "sender.lora_adapter(name, adapter_config(model))" in seen["whole"]
