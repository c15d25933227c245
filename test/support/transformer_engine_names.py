"""Gives a Megatron-Core model without Transformer Engine the module and parameter names that it has with it.

Transformer Engine fuses a norm with the linear layer behind it, and the experts of a rank into one module. The
parameters here are the same objects under the other names, so that the model runs as before.
"""

from __future__ import annotations

from torch import nn


def rename(model: nn.Module) -> None:
    """Renames what is in the layers of a GPTModel."""
    for layer in model.decoder.layers:
        _fuse(layer.self_attention.linear_qkv, layer, "input_layernorm")
        if hasattr(layer.mlp, "experts"):
            _group(layer.mlp.experts)
        else:
            _fuse(layer.mlp.linear_fc1, layer, "pre_mlp_layernorm")


def _fuse(linear: nn.Module, layer: nn.Module, norm: str) -> None:
    linear.__class__ = type("TELayerNormColumnParallelLinear", (type(linear),), {})
    linear.layer_norm_weight = getattr(layer, norm).weight
    _last(layer, norm)


def _group(experts: nn.Module) -> None:
    for name, kind in (("linear_fc1", "Column"), ("linear_fc2", "Row")):
        grouped = type(f"TE{kind}ParallelGroupedLinear", (nn.Module,), {})()
        grouped.config = experts.config
        for number, expert in enumerate(experts.local_experts):
            grouped.register_parameter(f"weight{number}", getattr(expert, name).weight)
        experts.add_module(name, grouped)
    _last(experts, "local_experts")


def _last(parent: nn.Module, child: str) -> None:
    """Moves a child to the end, as `named_parameters` lists a parameter only under its first name."""
    parent._modules[child] = parent._modules.pop(child)
