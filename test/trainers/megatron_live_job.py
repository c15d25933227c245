"""What the trainer ranks of test_megatron_live.py do: they have a Megatron-Core model, and rank 0 an engine, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmark.demo.reference import greedy_tokens
from sglang_reshard import VerlEngine
from sglang_reshard.patches.stock_weights import SERVE_DUMMY
from sglang_reshard.protocol.messages import decode, encode
from sglang_reshard.testing import cpu_host
from sglang_reshard.verl.megatron import Megatron
from support import megatron_bridge
from support.megatron_models import Case, checkpoint, load, logits, megatron_models, parallel, reference
from tools.oracle.digests import LOADER, read_live_digests

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 8


def all_gather(message: Any, kind: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, encode(message))
    return [decode(each, kind) for each in everyones]


class Job:
    """The trainer's model, an engine, and what is seen of it; no tokens where stock SGLang cannot on a CPU."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self.generates: bool = job["generates"]
        self.case = Case(**job["case"])
        self.exported = {version: self.export(version) for version in ("1", "2")}
        dist.barrier()
        cpu_host.activate(job["engine"]["tp_size"])
        self.engine = VerlEngine(
            device_mesh_cpu=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",)),
            bucket_bytes=1 << 20,
            timeout_s=180,
            model_path=str(self.folder / "1"),
            load_format="dummy",
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
            log_level="warning",
            **cpu_host.engine_arguments(**job["engine"]),
        )

    def export(self, version: str) -> dict[str, torch.Tensor]:
        """The checkpoint of a version. transformers itself writes it, for what it is compared with to load."""
        model = reference(self.case, seed=int(version))
        if dist.get_rank() == 0:
            model.save_pretrained(self.folder / version)
        return checkpoint(model)

    def tokens(self) -> list[list[int]]:
        if not self.generates:
            return []
        outputs = self.engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        )
        return [output["output_ids"] for output in outputs]

    def live_digests(self, version: str) -> list[dict[str, str]]:
        if self.engine.engine is None:
            return []
        return read_live_digests(self.engine.engine, self.folder / f"digests-{version}")


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates, the engine's digests and tokens after each, and what transformers says of the checkpoints."""
    megatron_bridge.install()
    run = Job(job)
    exchanges: list[Any] = []

    def exchange(message: Any, kind: Any) -> list[Any]:
        exchanges.append(message)
        return all_gather(message, kind)

    source = Megatron(exchange)
    hf_config = reference(run.case).config
    os.environ[SERVE_DUMMY] = "1"  # what it says before the first update is compared, too
    seen: dict[str, Any] = {"reports": [], "digests": [], "tokens": [run.tokens()], "expected": [], "logits": 0}
    with parallel(run.case):
        models = megatron_models(run.case, run.exported["1"])
        bridge = megatron_bridge.Bridge(run.case.tied, job["both_tied"])
        trainer = megatron_bridge.training_engine(models, hf_config, bridge)
        for version in ("1", "2"):
            load(run.case, models, run.exported[version])
            seen["logits"] += same_logits(run, models, version)
            given = source.tensors(trainer)
            assert not copied(given, models)
            report = run.engine.update_weights_from_tensor(given, weight_version=version)
            seen["reports"].append(report.as_dict())
            seen["digests"].append(run.live_digests(version))
            seen["tokens"].append(run.tokens())
            if run.generates and dist.get_rank() == 0:
                seen["expected"].append(greedy_tokens(run.folder / version, PROMPTS, NEW_TOKENS, "float32")[0])
    run.engine.shutdown()
    seen["exchanges"] = len(exchanges)
    return seen


def copied(given: list[tuple[str, torch.Tensor, Any]], models: list[Any]) -> list[str]:
    """The checkpoint tensors that are not views of a live parameter."""
    live = {parameter.untyped_storage().data_ptr() for model in models for parameter in model.parameters()}
    return [name for name, t, _ in given if t.numel() and t.untyped_storage().data_ptr() not in live]


def same_logits(run: Job, models: list[Any], version: str) -> bool:
    """Whether Megatron-Core's logits were compared with transformers', which the last pipeline stage can do."""
    tokens = torch.arange(16).view(2, 8)
    ours = logits(run.case, models, tokens)
    if ours is None:
        return False
    model = reference(run.case, seed=int(version))
    with torch.no_grad():
        torch.testing.assert_close(ours, model(tokens).logits, rtol=1e-4, atol=1e-4)
    return True
