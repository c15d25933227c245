"""Returns a verl training engine's shards on this rank as arguments of `describe`, in place; gathers nothing.

FSDP2     the DTensors of its state dict: nothing is copied, the inference engine casts
FSDP1     the pieces of its flat parameters, too
Megatron  the local parameters, described by verl's probes of Megatron-Bridge, see `megatron`
others    verl's shard contract, `get_per_tensor_param_shard`, see `shard_contract`; verl casts every shard there, so
          this rank holds a second copy of its shards during a sync

A LoRA adapter that is served as such is `lora_adapter`'s; in this case it is not merged with the weights that it
adapts.

Parameters that verl has offloaded are read where they are, in host memory; only the others, and those into which LoRA
adapters are merged, are moved to the GPU for a sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import ReshardError
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.update_sender import raising
from sglang_reshard.verl import fsdp, megatron, shard_contract
from sglang_reshard.verl.fsdp import NamedShards
from sglang_reshard.verl.training_engine_weights import serves_adapters


def unsupported_reason(engine: Any, adapter: Any = None, peft_config: Any = None) -> str:
    """Returns why these weights cannot be resharded; empty if they can.

    adapter      the rollout's ServerAdapter, if trainer and rollout share a process
    peft_config  of a LoRA adapter that is not merged, by verl
    """
    adapts = peft_config is not None or serves_adapters(engine)
    if adapts and adapter is None:
        return "unmerged LoRA adapters can be sent to colocated replicas only; set model.lora.merge=True"
    if adapts and not fsdp.is_fsdp(engine):
        return f"unmerged LoRA adapters of {type(engine).__name__} are not supported; set model.lora.merge=True"
    if getattr(engine, "_qat_enabled", False):
        return "quantization-aware training quantizes weights during the sync, which is not supported"
    if getattr(adapter, "_pd_role", None) is not None:
        return "rollout.disaggregation (prefill and decode on separate servers) is not supported"
    return ""


class EngineShards:
    """One trainer rank's shards. Returns the same objects for unchanged tensors, which makes updates short."""

    def __init__(self, trainer_rank: int, trainer_ranks: int) -> None:
        self._fsdp = fsdp.FsdpShards()
        self._contract = shard_contract.ShardContract(trainer_ranks)
        self._megatron = megatron.Megatron(trainer_rank, trainer_ranks)

    @contextlib.contextmanager
    def tensors(self, engine: Any) -> Iterator[tuple[NamedTensors, bool, bool]]:
        """Yields the shards, True if their memory is freed afterwards (merged, cast or offloaded ones), and `partial`.

        For an engine with no `unsupported_reason`. Reading the shards raises what is wrong with Megatron's.
        """
        with contextlib.ExitStack() as stack:
            if fsdp.is_fsdp(engine):
                merges = fsdp.is_peft(engine) and not serves_adapters(engine)
                if merges:
                    stack.enter_context(_on_device(engine))
                    stack.enter_context(fsdp.merged(engine))
                shards = self._fsdp.tensors(engine)
                yield shards, merges or _is_offloaded_next(engine, shards), False
            elif hasattr(engine, "_mcore_export_index"):  # verl's Megatron engine, whatever model is in it
                tensors: NamedShards = []
                try:
                    if not self._megatron.has_values(engine):
                        stack.enter_context(_on_device(engine))
                    tensors += self._megatron.tensors(engine)
                except ReshardError as error:  # in an update, of which all ranks learn
                    yield raising(error), False, True
                    return
                yield tensors, _is_offloaded_next(engine, tensors), True
            else:
                stack.enter_context(_on_device(engine))
                yield self._contract.tensors(engine), True, True


def lora_adapter(engine: Any) -> tuple[str, NamedShards, bool]:
    """Returns the LoRA adapter that an engine trains: its configuration, its shards, and whether they are freed."""
    config, shards = fsdp.served_adapter(engine)
    return config, shards, _is_offloaded_next(engine, shards)


def _is_offloaded_next(engine: Any, shards: NamedShards) -> bool:
    """Returns whether verl frees shards after the sync: those on a GPU, if it offloads parameters between uses."""
    tensors = (_local(row[1]) for row in shards)
    return bool(engine.is_param_offload_enabled) and any(map(runtime().on_gpu, filter(torch.Tensor.numel, tensors)))


@contextlib.contextmanager
def _on_device(engine: Any) -> Iterator[None]:
    """Moves offloaded parameters to the accelerator inside the block, as verl itself does for a sync."""
    moves = bool(engine.is_param_offload_enabled) and _device_name() != "cpu" and _is_offloaded(engine)
    if moves:
        engine.to(_device_name(), model=True, optimizer=False, grad=False)
    try:
        yield
    finally:
        if moves:
            engine.to("cpu", model=True, optimizer=False, grad=False)


def _is_offloaded(engine: Any) -> bool:
    modules = engine.module if isinstance(engine.module, (list, torch.nn.ModuleList)) else [engine.module]
    tensors = (_local(parameter) for module in modules for parameter in module.parameters())
    return not any(runtime().on_gpu(tensor) and tensor.untyped_storage().nbytes() for tensor in tensors)


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _device_name() -> str:
    from verl.utils.device import get_device_name

    return str(get_device_name())
