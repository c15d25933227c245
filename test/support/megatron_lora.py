"""Adapters of Megatron-Core's linear layers with the names, shards and computation of Megatron-Bridge's LoRA.

Megatron-Bridge needs an older transformers than SGLang, so it cannot run next to an engine. test_megatron_lora.py
compares names and shards with Megatron-Bridge itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn

from support.megatron_models import on_cpu


class Adapter(nn.Module):
    def __init__(self, base: Any, dim: int, alpha: int) -> None:
        super().__init__()
        self.dim, self.alpha, self.config = dim, alpha, base.config
        common: dict[str, Any] = {"config": base.config, "bias": False, "init_method": nn.init.normal_}
        by_columns = isinstance(base, RowParallelLinear)
        if by_columns:
            self.linear_in = RowParallelLinear(
                base.input_size, dim, input_is_parallel=True, skip_bias_add=True, **common
            )
        else:
            self.linear_in = ColumnParallelLinear(base.input_size, dim, gather_output=True, **common)
        self.linear_out = ColumnParallelLinear(dim, base.output_size, gather_output=by_columns, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_out(self.linear_in(x)[0])[0] * (self.alpha / self.dim)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.to_wrap, self.adapter = base, adapter

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias


def adapt(models: Sequence[GPTModel], dim: int, alpha: int) -> None:
    """Gives every linear layer of the decoder layers an adapter."""
    with on_cpu():
        for layer in (layer for model in models for layer in model.decoder.layers):
            for owner, names in (
                (layer.self_attention, ("linear_qkv", "linear_proj")),
                (layer.mlp, ("linear_fc1", "linear_fc2")),
            ):
                for name in names:
                    base = getattr(owner, name)
                    setattr(owner, name, Adapted(base, Adapter(base, dim, alpha)))


def train(models: Sequence[GPTModel], seed: int) -> None:
    """Writes other weights into the adapters, in place as an optimizer does; ranks should have different seeds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                if ".adapter." in name:
                    parameter.normal_(std=0.2, generator=generator)
