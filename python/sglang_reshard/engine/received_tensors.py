"""Receives tensors into memory of their own, for what is no model's parameters: a LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.casts import torch_dtype


class ReceivedTensors(torch.nn.Module):
    """Takes the place of a model whose weights are what the trainer sends, whole, in the dtypes in which it sends them.

    Nothing is served from this memory: an update is complete, and can still fail without consequences, until
    `post_load_weights` makes use of it. The memory is kept for the next update.

    tensors  name -> tensor, of the layout that was allocated last
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def allocate(self, specs: Sequence[TensorSpec]) -> None:
        """Allocates memory for a new layout. Called on every engine rank, before it is traced."""
        self.tensors = {}  # freed first
        self.tensors = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec), device=self._device) for spec in specs
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Makes use of the tensors. Called on every engine rank, once all ranks have received and verified them."""
        raise NotImplementedError
