"""Reads verl's FSDP engines: the shards of FSDP1 and FSDP2 modules, under their names in the checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sglang_reshard.sources import FlatBuffer, FusedTensor, adapter_config, adapter_tensors, named_shards
from sglang_reshard.sources.fused import slice_of

NamedShards = list[tuple[Any, ...]]
_SHARDS = "get_per_tensor_param_shard"  # what other engines define themselves


def is_fsdp(engine: Any) -> bool:
    """Returns True if FSDP's own state describes an engine's shards completely.

    VeOmni's engines use FSDP2, too, but shard experts outside of it.
    """
    from verl.utils.fsdp_utils import fsdp_version
    from verl.workers.engine.fsdp import FSDPEngine

    plain = getattr(type(engine), _SHARDS, None) is getattr(FSDPEngine, _SHARDS)
    return plain and fsdp_version(engine.module) in (1, 2)


def is_peft(engine: Any) -> bool:
    return hasattr(_peft_model(engine), "peft_config")


def peft_config(engine: Any) -> dict[str, Any]:
    """Returns the second result of verl's `get_per_tensor_param`, the configuration of an adapter."""
    found: dict[str, Any] = _peft_model(engine).peft_config["default"].to_dict()
    return found


def served_adapter(engine: Any) -> tuple[str, NamedShards]:
    """Returns the LoRA adapter of an engine, as `WeightSender.lora_adapter` and its `update` take it."""
    return adapter_config(_peft_model(engine)), adapter_tensors(engine.module)


def _peft_model(engine: Any) -> Any:
    module = getattr(engine, "module", None)
    return getattr(module, "_fsdp_wrapped_module", module)


def merged(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Merges LoRA adapters into the weights inside the block, as verl does."""
    from verl.utils.fsdp_utils import merged_lora_context

    return merged_lora_context(engine.module, backup_adapters=True)


class FsdpShards:
    """Reads shards. Keeps the description of each fused tensor and flat buffer: the same object means no change."""

    def __init__(self) -> None:
        self._fused: dict[str, FusedTensor | None] = {}
        self._buffers: dict[int, tuple[FlatBuffer, FlatBuffer]] = {}  # by id, with what it is as verl names it

    def tensors(self, engine: Any) -> list[tuple[Any, ...]]:
        from verl.utils.fsdp_utils import fsdp_version

        if fsdp_version(engine.module) == 2:
            return [self._row(engine, *row) for row in _renamed(engine, engine.module.state_dict())]
        return [row for given in named_shards(engine.module) for row in self._fsdp1_rows(engine, *given)]

    def _fsdp1_rows(
        self, engine: Any, name: str, tensor: torch.Tensor, buffer: FlatBuffer | None = None
    ) -> Iterator[tuple[Any, ...]]:
        if buffer is None:
            yield from (self._row(engine, *row) for row in _renamed(engine, {name: tensor}))
            return
        if id(buffer) not in self._buffers:
            self._buffers[id(buffer)] = buffer, self._as_in_checkpoint(engine, buffer)
        yield name, tensor, self._buffers[id(buffer)][1]

    def _as_in_checkpoint(self, engine: Any, buffer: FlatBuffer) -> FlatBuffer:
        members = []
        for name, member in _renamed(engine, {member.name: member for member in buffer.members}):
            fused = self._fused_tensor(engine, name, member.shape)
            slices = fused.slices if fused is not None else ()
            members.append(dataclasses.replace(member, name=name, slices=slices))
        return FlatBuffer(tuple(members), buffer.ranges)

    def _row(self, engine: Any, name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        fused = self._fused_tensor(engine, name, tuple(tensor.shape))
        return (name, tensor) if fused is None else (name, tensor, fused)

    def _fused_tensor(self, engine: Any, name: str, shape: tuple[int, ...]) -> FusedTensor | None:
        if name not in self._fused:
            self._fused[name] = _unfused(name, shape, engine.model_config.hf_config.model_type)
        return self._fused[name]


def _renamed(engine: Any, state: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Returns what is in the checkpoint under its names there; LoRA adapters are not."""
    from verl.utils.fsdp_utils import normalize_peft_param_name
    from verl.utils.model import convert_weight_keys

    if is_peft(engine):
        state = normalize_peft_param_name(state)
    found: dict[str, Any] = convert_weight_keys(state, engine.module)
    return found.items()


def _unfused(name: str, shape: tuple[int, ...], model_type: str) -> FusedTensor | None:
    """Returns the slices that verl makes of a tensor of fused experts, found on the meta device; None for others."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    whole = torch.empty(shape, device="meta")
    slices = list(unfuse_moe_params([(name, whole)], model_type))
    if len(slices) == 1 and slices[0][1] is whole:
        return None
    return FusedTensor(tuple((member, slice_of(view, shape)) for member, view in slices))
