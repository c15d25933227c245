"""Training state -> Layout: which trainer rank holds which boxes of which checkpoint tensor."""

from sglang_reshard.sources.placements import Holdings, Layout, Mesh, Piece, Placement, SourceTensor
from sglang_reshard.sources.state import TrainerState, describe

__all__ = ["Holdings", "Layout", "Mesh", "Piece", "Placement", "SourceTensor", "TrainerState", "describe"]
