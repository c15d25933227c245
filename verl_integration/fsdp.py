"""Reads verl's FSDP2 engines: the DTensors of the state dict, under their names in the checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.sources import FusedTensor
from sglang_reshard.sources.fused import slice_of


def is_fsdp2(engine: Any) -> bool:
    """Returns True if the DTensors of an engine's state dict describe its shards completely.

    VeOmni's engines use FSDP2, too, but shard experts outside of it.
    """
    from verl.utils.fsdp_utils import fsdp_version
    from verl.workers.engine.fsdp import FSDPEngine

    plain = type(engine).get_per_tensor_param_shard is FSDPEngine.get_per_tensor_param_shard
    return plain and fsdp_version(engine.module) == 2


def is_peft(engine: Any) -> bool:
    return hasattr(getattr(engine, "module", None), "peft_config")


@contextlib.contextmanager
def merged(engine: Any) -> Iterator[None]:
    """Merges LoRA adapters into the weights inside the block, as verl does."""
    from verl.utils.fsdp_utils import merged_lora_context

    with merged_lora_context(engine.module, backup_adapters=True):
        yield


class Fsdp2:
    """Reads shards. Keeps the `FusedTensor` of each tensor of fused experts: the same object means no change."""

    def __init__(self) -> None:
        self._fused: dict[str, FusedTensor | None] = {}

    def tensors(self, engine: Any) -> list[tuple[Any, ...]]:
        from verl.utils.fsdp_utils import normalize_peft_param_name
        from verl.utils.model import convert_weight_keys

        state = engine.module.state_dict()
        if is_peft(engine):
            state = normalize_peft_param_name(state)
        state = convert_weight_keys(state, engine.module)
        model_type = engine.model_config.hf_config.model_type
        shards: list[tuple[Any, ...]] = []
        for name, tensor in state.items():
            fused = self._fused_tensor(name, tensor, model_type)
            shards.append((name, tensor) if fused is None else (name, tensor, fused))
        return shards

    def _fused_tensor(self, name: str, tensor: torch.Tensor, model_type: str) -> FusedTensor | None:
        if name not in self._fused:
            self._fused[name] = _unfused(name, tuple(tensor.shape), model_type)
        return self._fused[name]


def _unfused(name: str, shape: tuple[int, ...], model_type: str) -> FusedTensor | None:
    """Returns the slices that verl makes of a tensor of fused experts, found on the meta device; None for others."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    whole = torch.empty(shape, device="meta")
    slices = list(unfuse_moe_params([(name, whole)], model_type))
    if len(slices) == 1 and slices[0][1] is whole:
        return None
    return FusedTensor(tuple((member, slice_of(view, shape)) for member, view in slices))
