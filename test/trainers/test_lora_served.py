"""LoRA adapters that PEFT trains over FSDP, served as adapters by a real engine: only the adapter's tensors move.

Compared with SGLang's own load of the adapter that PEFT has saved, slot by slot, and with PEFT's greedy tokens; with
rsLoRA, whose scaling SGLang's own load does not know, with PEFT's log-probabilities. Several adapters of one update:
with SGLang's own loads of them, and refused together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from sglang_reshard import Adapter, WeightSender
from sglang_reshard.selftest.digests import digest, write_json
from sglang_reshard.sources import adapter_config, adapter_tensors, base_tensors
from support.live_engines import LORA, MODULES, PROMPTS, greedy, live_digests, live_engine
from support.log_probs import log_probs, served_log_probs
from support.refusals import refusal_of
from support.sglangs import chosen
from support.tiny_qwen3 import tiny_qwen3
from support.trainer_rows import shown
from support.trainers import run_trainers

LOADER = "test_lora_served.write_slots"
SPOIL = "test_lora_served.spoil_slots"
CONFIG = tiny_qwen3(tie_word_embeddings=False)


def write_slots(model: nn.Module, named_tensors: Any) -> None:
    """A custom weight loader: every rank writes the digests of its part of each slot of the memory pool."""
    slots: dict[int, list[str]] = {}
    for module in model.modules():
        for name in ("A_buffer", "B_buffer", "A_buffer_gate_up", "B_buffer_gate_up", "A_buffer_qkv", "B_buffer_qkv"):
            if isinstance(pool := getattr(module, name, None), torch.Tensor):
                for slot, tensor in enumerate(pool):
                    slots.setdefault(slot, []).append(digest(tensor))
    write_json(list(slots.values()), named_tensors)


def spoil_slots(model: nn.Module, named_tensors: Any) -> None:
    """A custom weight loader: no adapter can be loaded into a slot any more; called again, it can."""

    def fail(*_: Any) -> None:
        raise ValueError("spoilt")

    for module in model.modules():
        if vars(module).pop("slice_lora_a_weights", None) is None and hasattr(module, "slice_lora_a_weights"):
            vars(module)["slice_lora_a_weights"] = fail
    write_json([], named_tensors)


def peft_model(rank: int = 4, others: Mapping[str, int] | None = None, **options: Any) -> PeftModel:
    """`others`: further adapters, and their ranks."""
    torch.manual_seed(0)
    common = {"lora_alpha": 8, "target_modules": MODULES, "init_lora_weights": False}
    model = get_peft_model(Qwen3ForCausalLM(CONFIG).float(), LoraConfig(r=rank, **common, **options))
    for name, other in (others or {}).items():
        model.add_adapter(name, LoraConfig(r=other, **common))
    return model


def sharded(strategy: str, model: PeftModel) -> nn.Module:
    if strategy == "FSDP1":
        policy = ModuleWrapPolicy({Qwen3DecoderLayer})
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    for module in model.modules():
        if isinstance(module, Qwen3DecoderLayer):
            fully_shard(module)
    return fully_shard(model)


class Job:
    """The trainer's model, and an engine that serves adapters."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self.reference = peft_model(others=job.get("others")).eval()
        if dist.get_rank() == 0:
            Qwen3ForCausalLM(CONFIG).save_pretrained(self.folder / "model")  # other weights
        dist.barrier()
        self.model = sharded(job["strategy"], peft_model(others=job.get("others")))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=5.0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        options = {"skip_tokenizer_init": True, "lora_target_modules": MODULES, "max_loras_per_batch": 4}
        sizes = {"tp_size": job["tp_size"], "dtype": "float32"}
        self.engine = live_engine(mesh, self.folder / "model", loaders=[LOADER, SPOIL], **{**LORA, **options, **sizes})

    def step(self) -> None:
        """One of the optimizer's; the reference then has the model's weights, gathered by torch."""
        tokens = torch.arange(24).view(2, 12)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
        state = get_model_state_dict(self.model, options=options)
        if dist.get_rank() == 0:
            self.reference.load_state_dict(state)

    def tokens(self, adapter: str | None) -> list[list[int]]:
        return greedy(self.engine, lora_path=[adapter] * len(PROMPTS))

    def expected(self) -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            said = self.reference.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
            )
            found.append(said[0, len(prompt) :].tolist())
        return found

    def load_by_stock(self, name: str, adapter: str = "default") -> None:
        """SGLang's own load of an adapter that PEFT has saved."""
        if self.engine.engine is not None:
            self.reference.save_pretrained(self.folder / name, selected_adapters=[adapter])
            saved = self.folder / name / ("" if adapter == "default" else adapter)
            loaded = self.engine.engine.load_lora_adapter(name, str(saved))
            assert loaded.success, loaded.error_message
        dist.barrier()

    def slots(self) -> list[list[list[str]]]:
        """Of each TP rank, the digests of each slot."""
        return live_digests(self.engine, self.folder / "slots", LOADER)

    def spoil(self) -> None:
        live_digests(self.engine, self.folder / "spoilt", SPOIL)
        dist.barrier()


def two_versions(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates of an adapter; after each what the engine says, stock SGLang with the saved one, and PEFT."""
    run = Job(job)
    seen: dict[str, Any] = {"reports": [], "served": [], "stock": [], "expected": [], "slots": [], "base": []}
    run.engine.update_weights_from_tensor(base_tensors(run.model))
    policy = run.engine.lora_adapter("policy", adapter_config(run.reference))
    for version in ("1", "2"):
        run.step()
        report = policy.update(adapter_tensors(run.model), weight_version=version)
        seen["reports"].append(report.as_dict())
        seen["served"].append(run.tokens("policy"))
        run.load_by_stock(f"stock-{version}")
        seen["stock"].append(run.tokens(f"stock-{version}"))
        seen["slots"].append(run.slots())
        seen["base"].append(run.tokens(None))
        if dist.get_rank() == 0:
            seen["expected"].append(run.expected())
    if dist.get_rank() == 0:
        with run.reference.disable_adapter():
            seen["base"].append(run.expected())
    seen["refused"] = refusals(run)
    seen["after"] = run.tokens("policy")
    seen["torn"] = torn(run, policy)
    seen["healed"] = run.tokens("policy")
    seen["rooted"] = scaled_by_the_root(run)
    run.engine.shutdown()
    return seen


def several(job: dict[str, Any]) -> dict[str, Any]:
    """Two adapters in one update, one of them with a third, and good ones with one that no slot has room for.

    After each, what every adapter says, and SGLang's own loads of those that were sent.
    """
    run, rounds = Job(job), []
    run.engine.update_weights_from_tensor(base_tensors(run.model))
    adapters = run.engine.lora_adapters()
    large = peft_model(rank=16)
    refused = Adapter(adapter_config(large), adapter_tensors(large))
    for number, names in enumerate((("math", "code"), ("code", "default"), ("default", "math"))):
        with torch.no_grad():
            for model in (run.model, run.reference):
                for name, parameter in model.named_parameters():
                    if any(f".{adapter}." in name for adapter in names):
                        parameter.mul_(3 + number)
        sent = {n: Adapter(adapter_config(run.reference, n), adapter_tensors(run.model, n)) for n in names}
        why = ""
        if number == 2:
            why = ": ".join(refusal_of(lambda sent=sent: adapters.update({**sent, "large": refused})))
        else:
            sent["code"] = replace(sent["code"], version=f"code-{number}")
            adapters.update(sent, weight_version=str(number))
        stock = {}
        for name in names:
            run.load_by_stock(f"{name}-{number}", name)
            stock[name] = run.tokens(f"{name}-{number}")
        told = {name: version for name, version in run.engine.weights_info().adapters.items() if "-" not in name}
        served = {name: run.tokens(name) for name in told}
        rounds.append({"served": served, "stock": stock, "versions": told, "refused": why, "base": run.tokens(None)})
    run.engine.shutdown()
    return {"rounds": rounds}


def log_probs_of(model: PeftModel) -> list[list[float]]:
    with torch.no_grad():
        return [log_probs(model(input_ids=torch.tensor([prompt])).logits[0], prompt) for prompt in PROMPTS]


def scaled_by_the_root(run: Job) -> dict[str, Any]:
    """The adapter's tensors under rsLoRA's configuration: what the engine says of the prompts, and PEFT with both."""
    model = peft_model(use_rslora=True).eval()
    model.load_state_dict(run.reference.state_dict())
    run.engine.lora_adapter("rooted", adapter_config(model)).update(adapter_tensors(run.model))
    return {
        "served": served_log_probs(run.engine, PROMPTS, "rooted"),
        "expected": log_probs_of(model),
        "otherwise": log_probs_of(run.reference),
    }


def refusals(run: Job) -> list[str]:
    """What the engine answers to adapters that it cannot serve."""

    def answer(name: str, config: str, tensors: Any) -> str:
        return ": ".join(refusal_of(lambda: run.engine.lora_adapter(name, config).update(tensors)))

    large = peft_model(rank=16)
    names = [row[0] for row in adapter_tensors(run.reference)]
    of_no_layer = [(name, torch.ones(4, 64) if "lora_A" in name else torch.ones(64, 4)) for name in names]
    return [
        answer("other", adapter_config(peft_model(rank=8)), adapter_tensors(run.model)),
        answer("large", adapter_config(large), adapter_tensors(large)),
        answer("whole", adapter_config(run.reference), base_tensors(run.model)),
        answer("sizes", adapter_config(run.reference), of_no_layer),
    ]


def torn(run: Job, policy: WeightSender) -> dict[str, Any]:
    """Engine ranks that cannot load an adapter any more: what then is said, and still served."""
    run.spoil()
    found = {
        "update": refusal_of(lambda: policy.update(adapter_tensors(run.model))),
        "request": refusal_of(lambda: run.tokens("policy")),
        "base": run.tokens(None),
    }
    run.spoil()
    policy.update(adapter_tensors(run.model))
    return found


pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("forks")]
SLOT = 1  # the base model's is the first


@pytest.mark.parametrize(
    ("strategy", "sglang"),
    [
        ("FSDP2", "pinned"),
        pytest.param("FSDP1", "pinned", marks=pytest.mark.sweep),
        pytest.param("FSDP2", "newest", marks=pytest.mark.sweep),
    ],
)
def test_an_engine_serves_the_adapter(strategy: str, sglang: str, tmp_path: Path, record_property: Any) -> None:
    with chosen(sglang):
        seen, other = run_trainers(2, two_versions, tmp_path, strategy=strategy, tp_size=2)
    assert seen["served"] == seen["stock"] == seen["expected"] == other["served"]
    assert seen["after"] == seen["served"][1] != seen["served"][0]
    *base, without_adapter = seen["base"]
    assert base == [without_adapter] * 2
    assert without_adapter not in seen["served"]
    for version, ranks in enumerate(seen["slots"], 1):
        assert len(ranks) == 2
        for slots in ranks:
            assert slots[SLOT] == slots[SLOT + version]
            assert len({str(slot) for slot in slots}) == 1 + version  # and zeros
    for report in seen["reports"]:
        for rank in report["engine_ranks"]:
            assert rank["received_bytes"] == rank["least_bytes"] == adapter_bytes()
    wrong_rank, too_large, no_adapter, wrong_sizes = seen["refused"]
    assert "is not of an adapter of rank 8" in wrong_rank
    assert "incompatible with the current LoRA memory pool" in too_large
    assert "is no tensor of a LoRA adapter" in no_adapter
    assert "SGLang cannot load the LoRA adapter sizes: AssertionError: LoRA buffer shape" in wrong_sizes
    torn = seen["torn"]
    assert torn["update"][0] == "TornWeights"
    assert "The engine has unloaded the LoRA adapter policy: repeat the update" in torn["update"][1]
    assert "loaded: policy" in torn["request"][1]
    assert torn["base"] == without_adapter
    assert seen["healed"] == seen["after"]
    rooted = {said: torch.tensor([p for prompt in found for p in prompt]) for said, found in seen["rooted"].items()}
    torch.testing.assert_close(rooted["served"], rooted["expected"], rtol=1e-4, atol=1e-4)
    assert (rooted["otherwise"] - rooted["expected"]).abs().max() > 0.1
    record_property("trainer", shown(f"{strategy}, PEFT", "adapter_tensors", "auto", "run", 1.0))


@pytest.mark.parametrize("sglang", ["pinned", pytest.param("newest", marks=pytest.mark.sweep)])
def test_an_engine_serves_all_adapters_of_an_update_or_keeps_the_old_ones(sglang: str, tmp_path: Path) -> None:
    with chosen(sglang):
        jobs = run_trainers(2, several, tmp_path, strategy="FSDP2", tp_size=2, others={"math": 4, "code": 8})
    first, second, refused = jobs[0]["rounds"]
    assert first["served"] == first["stock"]
    assert first["versions"] == {"math": "0", "code": "code-0"}
    assert second["served"] == second["stock"] | {"math": first["stock"]["math"]}
    assert second["versions"] == {"math": "0", "code": "code-1", "default": "1"}
    assert "the LoRA adapter large is refused" in refused["refused"]
    assert refused["served"] == second["served"]
    assert refused["versions"] == second["versions"]
    assert all(refused["stock"][name] != refused["served"][name] for name in ("default", "math")), "new weights differ"
    said = [tokens for seen in (first, second) for tokens in (*seen["stock"].values(), seen["base"])]
    assert len({str(tokens) for tokens in said}) == 5, "each adapter and version, and the base model, say otherwise"


def adapter_bytes() -> int:
    """Of rank 4 in float32, on the seven projections of two layers, as (in, out)."""
    shapes = [(128, 256), (128, 128), (128, 128), (256, 128), (128, 192), (128, 192), (192, 128)]
    return 4 * 4 * 2 * sum(map(sum, shapes))
