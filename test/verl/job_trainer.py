"""verl's actor workers in a test's job, and what is done inside of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
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

    def leave_out_is_master(self) -> None:
        """Gives trainer ranks but the first new checkpoint engines, with the default of `is_master`."""
        self.each(leave_out_is_master)

    def perturb(self, seed: int, only: str = "") -> None:
        self.each(perturb, seed, only)

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
        """tensors: how many there are. Bytes of trainer rank 0's shards: of matrices, vectors and LoRA adapters."""
        return self.each(sizes)[0]


# ---- inside a worker; verl keeps the module at worker.actor.engine.module


def perturb(worker: Any, seed: int, only: str = "") -> None:
    """Change every element of this rank's shards with `only` in their names, in the same way for the same seed."""
    with torch.no_grad():
        for name, parameter in worker.actor.engine.module.named_parameters():
            if only not in name:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {worker.rank} {name}".encode()))
            local.mul_(1 + 0.1 * torch.rand(local.shape, generator=generator))
            local.add_(0.01 * torch.randn(local.shape, generator=generator))


def leave_out_is_master(worker: Any) -> None:
    if worker.rank != 0:
        config = worker.config.rollout.checkpoint_engine
        settings = config.engine_kwargs.get(config.backend, {})
        worker.checkpoint_engine = type(worker.checkpoint_engine)(bucket_size=1, **settings)


def save_checkpoint(worker: Any, folder: str) -> None:
    """What transformers and a stock engine load, by rank 0; LoRA adapters merged, as verl does.

    Gathers the model, so not to be counted.
    """
    from transformers import Qwen3ForCausalLM
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

    module = worker.actor.engine.module
    if hasattr(module, "peft_config"):
        with merged_lora_context(module, backup_adapters=True):
            state = normalize_peft_param_name(gathered(module))
    else:
        state = gathered(module)
    if worker.rank == 0:
        with torch.device("meta"):
            unsharded = Qwen3ForCausalLM(module.config)
        unsharded.save_pretrained(folder, state_dict=state)


def gathered(module: torch.nn.Module) -> dict[str, Any]:
    offload = not isinstance(module, FullyShardedDataParallel)  # which frees what it gathered if that is on the CPU
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    return dict(get_model_state_dict(module, options=options))


def count_gathers(worker: Any) -> None:
    """Of DTensors, and of FSDP1's flat parameters."""

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def gather(self: Any, *arguments: Any, **options: Any) -> Any:
            worker.test_gathers += 1
            return original(self, *arguments, **options)

        return gather

    worker.test_gathers = 0
    DTensor.full_tensor = counted(DTensor.full_tensor)
    FlatParamHandle.unshard = counted(FlatParamHandle.unshard)


def gathers(worker: Any) -> int:
    counted, worker.test_gathers = worker.test_gathers, 0
    return counted


def sizes(worker: Any) -> dict[str, int]:
    module = worker.actor.engine.module
    shards, adapters = list(shard_sizes(module)), [t for n, t in module.named_parameters() if "lora_" in n]
    return {
        "tensors": len(shards),
        "rank0_matrix_bytes": sum(nbytes for dims, nbytes in shards if dims > 1),
        "rank0_vector_bytes": sum(nbytes for dims, nbytes in shards if dims == 1),
        "rank0_adapter_bytes": sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in adapters),
    }


def shard_sizes(module: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """Dimensions of each parameter, and bytes of this rank's shard, as torch itself has them."""
    if not isinstance(module, FullyShardedDataParallel):
        for parameter in module.parameters():
            yield parameter.ndim, parameter.to_local().nbytes
        return
    for wrapped in FullyShardedDataParallel.fsdp_modules(module):
        flat = wrapped._handle.flat_param
        for shape, info in zip(flat._shapes, flat._shard_param_infos, strict=True):
            yield len(shape), (info.numel_in_shard or 0) * flat.itemsize
