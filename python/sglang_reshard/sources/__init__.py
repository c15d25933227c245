"""Training state -> `SourceLayout`: which trainer rank holds which boxes of which checkpoint tensor."""

from __future__ import annotations

from typing import Any

from sglang_reshard import _deprecated
from sglang_reshard.layout.shard_map import ExplicitSharding, Shard, ShardMap
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.sources.finite import first_not_finite
from sglang_reshard.sources.fsdp import named_shards
from sglang_reshard.sources.fused import FusedSlice, FusedTensor, slice_of
from sglang_reshard.sources.layout_probe import fused_slices
from sglang_reshard.sources.state import NamedTensors, TrainerState, describe, listed
from sglang_reshard.sources.tied import tied_names
from sglang_reshard.sources.verl_shard_spec import blocks

__all__ = [
    "ExplicitSharding",
    "FusedSlice",
    "FusedTensor",
    "Mesh",
    "NamedTensors",
    "Placement",
    "Shard",
    "ShardMap",
    "SourceLayout",
    "SourceTensor",
    "TrainerState",
    "blocks",
    "describe",
    "first_not_finite",
    "fused_slices",
    "listed",
    "named_shards",
    "slice_of",
    "tied_names",
]


def __getattr__(name: str) -> Any:
    return _deprecated.attribute(__name__, name)
