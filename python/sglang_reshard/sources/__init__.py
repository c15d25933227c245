"""Reads a training state: DTensors, modules of FSDP1 and FSDP2, flat buffers, fused tensors, explicit shardings, specs.

In: `NamedTensors`, (name, tensor[, sharding]), or a module. Out, by `describe`: a `TrainerState`, the `SourceLayout`
that all trainer ranks share and this rank's local shards. A *fused tensor* represents several checkpoint tensors, each
a *slice* of it. `MemoryIdentity` tells whether an update passes the same memory in the same sharding as the last one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang_reshard.layout.shard_map import ExplicitSharding, ShardBox, ShardMap
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.sources.module import named_shards
from sglang_reshard.sources.state import NamedTensors, TrainerState, as_list, describe, tied_names

if TYPE_CHECKING:
    from sglang_reshard.sources.conversion import checkpoint_tensors
    from sglang_reshard.sources.flat import FlatBuffer, FlatMember
    from sglang_reshard.sources.fused import FusedSlice, FusedTensor, slice_of
    from sglang_reshard.sources.lora import adapter_tensors, base_tensors
    from sglang_reshard.sources.lora_config import adapter_config
    from sglang_reshard.sources.megatron_lora import megatron_adapter_config, megatron_adapter_tensors
    from sglang_reshard.sources.traced_parameters import Conversion, TracedParameters
    from sglang_reshard.sources.verl_shard_spec import blocks, fused_slices

# What most trainers do not use, by the module in this package that has it, which is imported then.
_LAZY = {
    "conversion": ("checkpoint_tensors",),
    "flat": ("FlatBuffer", "FlatMember"),
    "fused": ("FusedSlice", "FusedTensor", "slice_of"),
    "lora": ("adapter_tensors", "base_tensors"),
    "lora_config": ("adapter_config",),
    "megatron_lora": ("megatron_adapter_config", "megatron_adapter_tensors"),
    "traced_parameters": ("Conversion", "TracedParameters"),
    "verl_shard_spec": ("blocks", "fused_slices"),
}
_DEFINED_IN = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "Conversion",
    "ExplicitSharding",
    "FlatBuffer",
    "FlatMember",
    "FusedSlice",
    "FusedTensor",
    "Mesh",
    "NamedTensors",
    "Placement",
    "ShardBox",
    "ShardMap",
    "SourceLayout",
    "SourceTensor",
    "TracedParameters",
    "TrainerState",
    "adapter_config",
    "adapter_tensors",
    "as_list",
    "base_tensors",
    "blocks",
    "checkpoint_tensors",
    "describe",
    "fused_slices",
    "megatron_adapter_config",
    "megatron_adapter_tensors",
    "named_shards",
    "slice_of",
    "tied_names",
]


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
