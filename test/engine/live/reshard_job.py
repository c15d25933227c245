"""What the trainer ranks of test_reshard.py do; every one runs it in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmark.demo import text, tiny_model
from benchmark.demo.reference import greedy_tokens
from benchmark.demo.trainer import Trainer
from sglang_reshard import VerlEngine
from sglang_reshard.testing import cpu_host
from support.refusals import refusal_of
from tools.oracle.digests import LOADER, read_live_digests

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]


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
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        self.trainer = Trainer(tiny_model.config(tp, target_tp), mesh["tp"], mesh["dp"] if world > tp else None)
        self.tokenizer = tiny_model.tokenizer()
        all_ranks = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
        self.engine = self.start(all_ranks)
        self.seen: dict[str, Any] = {}

    def start(self, mesh: DeviceMesh) -> VerlEngine:
        target_tp = self.job["target_tp"]
        cpu_host.activate(target_tp)
        return VerlEngine(
            device_mesh_cpu=mesh,
            tp_size=target_tp,
            transport=self.job.get("transport", "auto"),
            bucket_bytes=self.job["bucket_bytes"],
            timeout_s=180,
            model_path=str(self.model_path),
            load_format="dummy",
            dtype=self.job["dtype"],
            custom_weight_loader=[LOADER],
            **cpu_host.engine_arguments(),
        )

    def update(self, version: str, **options: Any) -> dict[str, Any]:
        return self.engine.update_weights_from_tensor(
            self.trainer.model.named_parameters(), weight_version=version, **options
        ).as_dict()

    def refusal(self, version: str | None, **options: Any) -> list[str]:
        """How an update that must not succeed is refused."""
        named = options.pop("named", None) or self.trainer.model.named_parameters()
        return refusal_of(lambda: self.engine.update_weights_from_tensor(named, weight_version=version, **options))

    def step_and_save(self, version: str) -> None:
        self.trainer.step(self.tokenizer)
        self.trainer.save_checkpoint(self.checkpoint(version))
        dist.barrier()

    def checkpoint(self, version: str) -> Path:
        return self.folder / f"checkpoint-{version}"

    def tokens(self) -> list[list[int]]:
        outputs = self.engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": text.NEW_TOKENS, "ignore_eos": True},
        )
        return [o["output_ids"] for o in outputs]

    def expected_tokens(self, version: str) -> list[list[int]]:
        return greedy_tokens(self.checkpoint(version), PROMPTS, text.NEW_TOKENS, "float32")[0]

    def live_digests(self, name: str) -> list[dict[str, str]]:
        if self.engine.engine is None:
            return []
        return read_live_digests(self.engine.engine, self.folder / f"digests-{name}")


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Step, update, step, update; with the digests and tokens after each."""
    run = Job(job)
    seen: dict[str, Any] = {"reports": [], "digests": [], "tokens": [], "expected": []}
    for version in ("1", "2"):
        run.step_and_save(version)
        seen["reports"].append(run.update(version))
        seen["tokens"].append(run.tokens())
        seen["digests"].append(run.live_digests(version))
        seen["expected"].append(run.expected_tokens(version))
    run.engine.shutdown()
    return seen


def life_of_an_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates with mistakes, stock updates and pauses around them."""
    run = Job(job)
    seen: dict[str, Any] = {"digests": {}, "tokens": {}, "refusals": {}}
    first = run.engine.engine  # None on all ranks but the first

    def look(name: str) -> None:
        seen["digests"][name] = run.live_digests(name)
        seen["tokens"][name] = run.tokens()

    run.step_and_save("1")
    seen["first"] = run.update("1")
    look("1")
    seen["refusals"]["same version"] = run.refusal("1")
    parameters = dict(run.trainer.model.named_parameters())
    without = {n: p for n, p in parameters.items() if not n.endswith("layers.1.mlp.down_proj.weight")}
    seen["refusals"]["missing"] = run.refusal(None, named=without.items())
    unknown = {**parameters, "model.layers.1.mlp.no_such_proj.weight": torch.zeros(3)}
    seen["refusals"]["partly on one rank"] = run.refusal(None, named=(unknown if run.rank == 1 else parameters).items())
    if first is not None:
        first.release_memory_occupation(["weights"])
    seen["refusals"]["offloaded"] = run.refusal(None)
    if first is not None:
        first.resume_memory_occupation(["weights"])
    look("1 after mistakes")
    run.step_and_save("2")
    seen["second"] = run.update("2")
    look("2")
    if first is not None:  # stock's own update, of the first weights again
        from safetensors.torch import load_file

        state = load_file(run.checkpoint("1") / "model.safetensors")
        assert first.update_weights_from_tensor(list(state.items()))[0]
    dist.barrier()
    look("1 by stock")
    seen["third"] = run.update("3")
    look("2 again")
    seen["version"] = first.tokenizer_manager.server_args.weight_version if first is not None else None
    run.engine.shutdown()
    return seen


def start_only(job: dict[str, Any]) -> list[str]:
    """How the start of an engine that cannot be updated fails."""
    return refusal_of(lambda: Job(job))
