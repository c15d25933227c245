"""A verl training engine's weights as `describe` takes them: this rank's shards, in place, nothing gathered.

FSDP2     the DTensors of its state dict themselves: nothing is copied, the engine casts
Megatron  the local parameters, with what verl's probes of Megatron-Bridge say of them, see `megatron`
others    verl's shard contract, `get_per_tensor_param_shard`, see `contract`; verl casts every shard there, so
          this rank holds a second copy of its shards while a sync lasts
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.verl import contract, fsdp, megatron
from sglang_reshard.verl.exchange import Exchange

Given = list[tuple[Any, ...]]


def not_carried(engine: Any, adapter: Any = None, peft_config: Any = None) -> str:
    """Why these weights cannot be resharded; empty if they can.

    adapter  the rollout's, where trainer and rollout share a process
    """
    if peft_config is not None or (fsdp.is_peft(engine) and not engine.model_config.lora.get("merge", False)):
        return "a LoRA adapter that is served as an adapter is not carried (model.lora.merge=True is)"
    if getattr(engine, "_qat_enabled", False):
        return "weights of quantization-aware training are quantized on the way to the rollout, which is not carried"
    if getattr(engine, "_uses_fsdp2_cpu_offload_policy", False) and _accelerated():
        return "fsdp_config.offload_policy keeps the shards in pinned host memory that FSDP2 streams from"
    if adapter is None:
        return ""
    if adapter.config.get("quantization", None):
        return f"rollout.quantization={adapter.config.get('quantization')} quantizes on the way to the rollout"
    if getattr(adapter, "_pd_role", None) is not None:
        return "rollout.disaggregation (prefill and decode apart) is not carried"
    return ""


class Export:
    """One trainer rank's. Keeps what identifies tensors that did not change: an update without news is short.

    exchange  all trainer ranks' messages, in their order; metadata only
    """

    def __init__(self, exchange: Exchange) -> None:
        self._fsdp2 = fsdp.Fsdp2()
        self._contract = contract.Contract(exchange)
        self._megatron = megatron.Megatron(exchange)

    @contextlib.contextmanager
    def tensors(self, engine: Any) -> Iterator[tuple[Given, bool]]:
        """The given tensors, and whether their memory goes away at the end (offloaded parameters, casts).

        Raises Unsupported for an engine whose weights cannot be carried.
        """
        if reason := not_carried(engine):
            raise Unsupported(f"{reason}; there is no other way to a standalone replica")
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
    """Bring offloaded parameters to the accelerator, and back: engine ranks read them there. Whether it did."""
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
