"""verl's actor workers in a test's job, and what is done inside of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor


class JobTrainer:
    """`ranks` of verl's own ActorRolloutRefWorker, initialized.

    role  "actor" where engines have devices of their own, "actor_rollout" where they share the trainer's
    """

    def __init__(self, config: Any, ranks: int, role: str) -> None:
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.workers.engine_workers import ActorRolloutRefWorker

        self.pool = RayResourcePool(process_on_nodes=[ranks], use_gpu=True, max_colocate_count=2, name_prefix="trainer")
        worker = RayClassWithInitArgs(cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role=role)
        self.group = RayWorkerGroup(resource_pool=self.pool, ray_cls_with_init=worker, device_name="cpu")
        self.group.init_model()

    def each(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`call(worker, *arguments)` in every worker, all at once; what it returned, by trainer rank."""
        return ray.get([worker.__ray_call__.remote(call, *arguments) for worker in self.group.workers])

    def perturb(self, seed: int) -> None:
        self.each(perturb, seed)

    def save(self, folder: Path) -> Path:
        self.each(save_checkpoint, str(folder))
        return folder

    def count_gathers(self) -> None:
        """From now on; `gathers` tells how many."""
        self.each(count_gathers)

    def gathers(self) -> list[int]:
        """How many DTensors each trainer rank has gathered since it was last asked."""
        return self.each(gathers)

    def sizes(self) -> dict[str, int]:
        """tensors: how many there are. Bytes of trainer rank 0's shards: of matrices, and of vectors."""
        return self.each(sizes)[0]


# ---- inside a worker; verl keeps the module at worker.actor.engine.module


def perturb(worker: Any, seed: int) -> None:
    """Change every element of this rank's shards, in the same way for the same seed."""
    with torch.no_grad():
        for name, parameter in worker.actor.engine.module.named_parameters():
            local = parameter.to_local()
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {worker.rank} {name}".encode()))
            local.mul_(1 + 0.1 * torch.rand(local.shape, generator=generator))
            local.add_(0.01 * torch.randn(local.shape, generator=generator))


def save_checkpoint(worker: Any, folder: str) -> None:
    """What transformers and a stock engine load, by rank 0. Gathers the model, so not to be counted."""
    from transformers import Qwen3ForCausalLM

    module = worker.actor.engine.module
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if state:  # the other ranks get nothing
        with torch.device("meta"):
            unsharded = Qwen3ForCausalLM(module.config)
        unsharded.save_pretrained(folder, state_dict=state)


def count_gathers(worker: Any) -> None:
    original = DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> torch.Tensor:
        worker.test_gathers += 1
        return original(tensor, **options)

    worker.test_gathers = 0
    DTensor.full_tensor = counted


def gathers(worker: Any) -> int:
    counted, worker.test_gathers = worker.test_gathers, 0
    return counted


def sizes(worker: Any) -> dict[str, int]:
    shards = [parameter.to_local() for parameter in worker.actor.engine.module.parameters()]
    return {
        "tensors": len(shards),
        "rank0_matrix_bytes": sum(shard.nbytes for shard in shards if shard.ndim > 1),
        "rank0_vector_bytes": sum(shard.nbytes for shard in shards if shard.ndim == 1),
    }
