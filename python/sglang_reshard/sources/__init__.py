"""Training state -> Layout: which trainer rank holds which boxes of which checkpoint tensor."""

from sglang_reshard.sources.aliases import aliases
from sglang_reshard.sources.finite import first_not_finite
from sglang_reshard.sources.fsdp import named_shards
from sglang_reshard.sources.placements import Holdings, Layout, Mesh, Piece, Placement, SourceTensor
from sglang_reshard.sources.state import NamedTensors, TrainerState, describe, listed

__all__ = [
    "Holdings",
    "Layout",
    "Mesh",
    "NamedTensors",
    "Piece",
    "Placement",
    "SourceTensor",
    "TrainerState",
    "aliases",
    "describe",
    "first_not_finite",
    "listed",
    "named_shards",
]
