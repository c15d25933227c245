"""verl's FSDP2 engines: the DTensors of the state dict, under the names of the checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.sources import FusedTensor
from sglang_reshard.sources.fused import slice_of


def is_fsdp2(engine: Any) -> bool:
    """Whether the DTensors of an engine's state dict say all. VeOmni's are FSDP2's, too, of experts split by hand."""
    from verl.utils.fsdp_utils import fsdp_version
    from verl.workers.engine.fsdp import FSDPEngine

    plain = type(engine).get_per_tensor_param_shard is FSDPEngine.get_per_tensor_param_shard
    return plain and fsdp_version(engine.module) == 2


def is_peft(engine: Any) -> bool:
    return hasattr(getattr(engine, "module", None), "peft_config")


@contextlib.contextmanager
def merged(engine: Any) -> Iterator[None]:
    """Adapters, if there are any, are merged into the weights for as long as they are read, as verl merges them."""
    if not is_peft(engine):
        yield
        return
    from verl.utils.fsdp_utils import merged_lora_context

    with merged_lora_context(engine.module, backup_adapters=True):
        yield


class Fsdp2:
    """Keeps how stacked experts split, by name: a `FusedTensor` that is the same object stands for no change."""

    def __init__(self) -> None:
        self._stacks: dict[str, FusedTensor | None] = {}

    def tensors(self, engine: Any) -> list[tuple[Any, ...]]:
        from verl.utils.fsdp_utils import normalize_peft_param_name
        from verl.utils.model import convert_weight_keys

        state = engine.module.state_dict()
        if is_peft(engine):
            state = normalize_peft_param_name(state)
        state = convert_weight_keys(state, engine.module)
        model_type = engine.model_config.hf_config.model_type
        given: list[tuple[Any, ...]] = []
        for name, tensor in state.items():
            stack = self._stack(name, tensor, model_type)
            given.append((name, tensor) if stack is None else (name, tensor, stack))
        return given

    def _stack(self, name: str, tensor: torch.Tensor, model_type: str) -> FusedTensor | None:
        """What verl's own rule makes of a tensor of stacked experts, learned on a tensor without bytes."""
        if name not in self._stacks:
            self._stacks[name] = _split(name, tuple(tensor.shape), model_type)
        return self._stacks[name]


def _split(name: str, shape: tuple[int, ...], model_type: str) -> FusedTensor | None:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    whole = torch.empty(shape, device="meta")
    parts = list(unfuse_moe_params([(name, whole)], model_type))
    if len(parts) == 1 and parts[0][1] is whole:
        return None
    return FusedTensor(tuple((part, slice_of(view, shape)) for part, view in parts))
