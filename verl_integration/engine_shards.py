"""Returns a verl training engine's shards on this rank as arguments of `describe`, in place; gathers nothing.

FSDP2     the DTensors of its state dict: nothing is copied, the inference engine casts
Megatron  the local parameters, described by verl's probes of Megatron-Bridge, see `megatron`
others    verl's shard contract, `get_per_tensor_param_shard`, see `shard_contract`; verl casts every shard there, so
          this rank holds a second copy of its shards during a sync
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import fsdp, megatron, shard_contract
from sglang_reshard.verl.shard_exchange import AllGather

NamedShards = list[tuple[Any, ...]]


def unsupported_reason(engine: Any, adapter: Any = None, peft_config: Any = None) -> str:
    """Returns why these weights cannot be resharded; empty if they can.

    adapter  the rollout's ServerAdapter, if trainer and rollout share a process
    """
    if peft_config is not None or (fsdp.is_peft(engine) and not engine.model_config.lora.get("merge", False)):
        return "a LoRA adapter that is not merged is not supported; set model.lora.merge=True"
    if getattr(engine, "_qat_enabled", False):
        return "quantization-aware training quantizes weights during the sync, which is not supported"
    if getattr(engine, "_uses_fsdp2_cpu_offload_policy", False) and _accelerated():
        return "fsdp_config.offload_policy keeps the shards in pinned host memory, which is not supported"
    if adapter is None:
        return ""
    if adapter.config.get("quantization", None):
        return (
            f"rollout.quantization={adapter.config.get('quantization')} quantizes in the sync, which is not supported"
        )
    if getattr(adapter, "_pd_role", None) is not None:
        return "rollout.disaggregation (prefill and decode on separate servers) is not supported"
    return ""


class EngineShards:
    """One trainer rank's shards. Returns the same objects for unchanged tensors, which makes updates short."""

    def __init__(self, all_gather: AllGather) -> None:
        self._fsdp2 = fsdp.Fsdp2()
        self._contract = shard_contract.ShardContract(all_gather)
        self._megatron = megatron.Megatron(all_gather)

    @contextlib.contextmanager
    def tensors(self, engine: Any) -> Iterator[tuple[NamedShards, bool]]:
        """Yields the shards, and True if their memory is freed at the end (offloaded parameters, casts).

        Raises Unsupported for an engine whose weights cannot be resharded.
        """
        if reason := unsupported_reason(engine):
            raise Unsupported(f"{reason}; standalone replicas have no fallback")
        with _on_device(engine) as moved:
            if fsdp.is_fsdp2(engine):
                with fsdp.merged(engine):
                    yield self._fsdp2.tensors(engine), moved or fsdp.is_peft(engine)
            elif hasattr(engine, "_mcore_export_index"):  # verl's Megatron engine, whatever model is in it
                yield list(self._megatron.tensors(engine)), moved
            else:
                yield self._contract.tensors(engine), True


@contextlib.contextmanager
def _on_device(engine: Any) -> Iterator[bool]:
    """Moves offloaded parameters to the accelerator inside the block. Yields True if it did."""
    moves = bool(engine.is_param_offload_enabled) and _accelerated() and _is_on_host(engine)
    if moves:
        engine.to(_device_name(), model=True, optimizer=False, grad=False)
    try:
        yield moves
    finally:
        if moves:
            engine.to("cpu", model=True, optimizer=False, grad=False)


def _is_on_host(engine: Any) -> bool:
    modules = engine.module if isinstance(engine.module, (list, torch.nn.ModuleList)) else [engine.module]
    return all(parameter.device.type == "cpu" for module in modules for parameter in module.parameters())


def _device_name() -> str:
    from verl.utils.device import get_device_name

    return str(get_device_name())


def _accelerated() -> bool:
    return _device_name() != "cpu"
