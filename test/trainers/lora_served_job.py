"""What the trainer ranks of test_lora_served.py do: they train PEFT's adapters of a sharded model, and serve them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from sglang_reshard import VerlEngine, WeightSender
from sglang_reshard.errors import ReshardError
from sglang_reshard.sources import adapter_config, adapter_tensors, base_tensors
from sglang_reshard.testing import cpu_host
from support.log_probs import log_probs, served_log_probs
from support.tiny_qwen3 import tiny_qwen3
from tools.oracle.digests import digest, read_live_digests, write_json

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LOADER = "trainers.lora_served_job.write_slots"
SPOIL = "trainers.lora_served_job.spoil_slots"
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


def peft_model(rank: int = 4, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=MODULES, init_lora_weights=False, **options)
    return get_peft_model(Qwen3ForCausalLM(CONFIG).float(), config)


def sharded(strategy: str) -> nn.Module:
    model = peft_model()
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
        self.reference = peft_model().eval()
        if dist.get_rank() == 0:
            Qwen3ForCausalLM(CONFIG).save_pretrained(self.folder / "model")  # other weights
        dist.barrier()
        self.model = sharded(job["strategy"])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=5.0)
        cpu_host.activate(job["tp_size"])
        self.engine = VerlEngine(
            device_mesh_cpu=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
            timeout_s=180,
            model_path=str(self.folder / "model"),
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER, SPOIL],
            log_level="warning",
            enable_lora=True,
            max_lora_rank=8,
            max_loras_per_batch=4,
            lora_target_modules=MODULES,
            lora_backend="torch_native",
            **cpu_host.engine_arguments(tp_size=job["tp_size"], dtype="float32"),
        )

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
        outputs = self.engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, lora_path=[adapter] * len(PROMPTS))
        return [output["output_ids"] for output in outputs]

    def expected(self) -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            said = self.reference.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
            )
            found.append(said[0, len(prompt) :].tolist())
        return found

    def load_by_stock(self, name: str) -> None:
        """SGLang's own load of the adapter that PEFT has saved."""
        if self.engine.engine is not None:
            self.reference.save_pretrained(self.folder / name)
            loaded = self.engine.engine.load_lora_adapter(name, str(self.folder / name))
            assert loaded.success, loaded.error_message
        dist.barrier()

    def slots(self) -> list[list[list[str]]]:
        """Of each TP rank, the digests of each slot."""
        if self.engine.engine is None:
            return []
        return read_live_digests(self.engine.engine, self.folder / "slots", LOADER)

    def spoil(self) -> None:
        if self.engine.engine is not None:
            read_live_digests(self.engine.engine, self.folder / "spoilt", SPOIL)
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


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(run: Job) -> list[str]:
    """What the engine answers to adapters that it cannot serve."""

    def answer(name: str, config: str, tensors: Any) -> str:
        return refused(lambda: run.engine.lora_adapter(name, config).update(tensors))

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
        "update": refused(lambda: policy.update(adapter_tensors(run.model))),
        "request": refused(lambda: run.tokens("policy")),
        "base": run.tokens(None),
    }
    run.spoil()
    policy.update(adapter_tensors(run.model))
    return found
