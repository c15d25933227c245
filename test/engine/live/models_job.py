"""What the trainer ranks of test_reshard_models.py do: they hold a checkpoint's tensors as DTensors, without a model.

transformers 5 stacks a model's experts in memory, so the trainers here have the tensors under the names that
the checkpoint has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmark.demo.reference import greedy_tokens
from sglang_reshard import VerlEngine
from sglang_reshard.patches.stock_weights import SERVE_DUMMY
from sglang_reshard.testing import cpu_host
from tools.oracle.digests import LOADER, read_live_digests

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 8
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def placement(name: str, ndim: int) -> Placement:
    """As tensor parallelism has it."""
    if ndim == 1:
        return Replicate()
    return Shard(1 if name.endswith(ROW_PARALLEL) else 0)


def sharded(checkpoint: Path, mesh: DeviceMesh) -> dict[str, DTensor]:
    state = load_file(checkpoint / "model.safetensors")
    return {n: distribute_tensor(t, mesh, [placement(n, t.ndim)], src_data_rank=None) for n, t in state.items()}


class Job:
    """An engine, and what is seen of it. `generates` is false where stock SGLang cannot on a CPU."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self.generates: bool = job["generates"]
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        sizes = job["engine"]
        replicas = 1 if "enable_dp_attention" in sizes else sizes.get("dp_size", 1)
        cpu_host.activate(sizes["tp_size"], replicas * sizes.get("pp_size", 1))
        os.environ[SERVE_DUMMY] = "1"  # what it says before the first update is compared, too
        self.engine = VerlEngine(
            device_mesh_cpu=self.mesh,
            bucket_bytes=1 << 20,
            timeout_s=180,
            model_path=str(self.checkpoint("1")),
            load_format="dummy",
            skip_tokenizer_init=True,
            custom_weight_loader=[LOADER],
            log_level="warning",
            **cpu_host.engine_arguments(**job["engine"]),
        )

    def checkpoint(self, version: str) -> Path:
        return self.folder / version

    def tokens(self) -> list[list[int]]:
        if not self.generates:
            return []
        outputs = self.engine.generate(
            input_ids=PROMPTS,
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        )
        return [o["output_ids"] for o in outputs]

    def live_digests(self, name: str) -> list[dict[str, str]]:
        if self.engine.engine is None:
            return []
        return read_live_digests(self.engine.engine, self.folder / f"digests-{name}")

    def load_by_stock(self, version: str) -> None:
        if self.engine.engine is not None:
            loaded, *why = self.engine.engine.update_weights_from_disk(
                str(self.checkpoint(version)), load_format="auto"
            )
            assert loaded, why
        dist.barrier()


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates, with digests and tokens after each, and the same after a stock load of the first weights."""
    run = Job(job)
    seen: dict[str, Any] = {"reports": [], "digests": [], "tokens": [run.tokens()], "reference": []}
    state = sharded(run.checkpoint("1"), run.mesh)
    for version in ("1", "2"):
        for name, tensor in sharded(run.checkpoint(version), run.mesh).items():  # in place, as an optimizer writes
            state[name].to_local().copy_(tensor.to_local())
        report = run.engine.update_weights_from_tensor(state.items(), weight_version=version)
        seen["reports"].append(report.as_dict())
        seen["digests"].append(run.live_digests(version))
        seen["tokens"].append(run.tokens())
        if job["transformers"] and dist.get_rank() == 0:
            seen["reference"].append(greedy_tokens(run.checkpoint(version), PROMPTS, NEW_TOKENS, "float32")[0])
    run.load_by_stock("1")
    seen["tokens"].append(run.tokens())
    seen["digests"].append(run.live_digests("stock"))
    run.engine.shutdown()
    return seen
