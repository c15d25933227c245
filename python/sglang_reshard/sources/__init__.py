"""Training state -> Layout: which trainer rank holds which boxes of which checkpoint tensor."""

from sglang_reshard.sources.aliases import aliases
from sglang_reshard.sources.finite import first_not_finite
from sglang_reshard.sources.fsdp import named_shards
from sglang_reshard.sources.holdings import Held, Holdings, Piece
from sglang_reshard.sources.placements import Layout, Mesh, Placement, SourceTensor
from sglang_reshard.sources.shard_spec import blocks
from sglang_reshard.sources.slots import slots
from sglang_reshard.sources.stacked import Part, Stack, part_of
from sglang_reshard.sources.state import NamedTensors, TrainerState, describe, listed

__all__ = [
    "Held",
    "Holdings",
    "Layout",
    "Mesh",
    "NamedTensors",
    "Part",
    "Piece",
    "Placement",
    "SourceTensor",
    "Stack",
    "TrainerState",
    "aliases",
    "blocks",
    "describe",
    "first_not_finite",
    "listed",
    "named_shards",
    "part_of",
    "slots",
]
