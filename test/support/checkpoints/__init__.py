"""Tiny checkpoints with random weights of any model that transformers has a class for."""

from support.checkpoints.tiny_checkpoints import DRAFT, PUBLISHED, read_weights, write_checkpoint, write_weights
from support.checkpoints.tiny_configs import has_experts

__all__ = ["DRAFT", "PUBLISHED", "has_experts", "read_weights", "write_checkpoint", "write_weights"]
