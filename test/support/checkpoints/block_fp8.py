"""A checkpoint's linear layers as block-fp8, the way published checkpoints have them."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 128


def mark_linear(model: torch.nn.Module) -> None:
    """Ones in the weights of linear layers and experts, zeros in all others: a mark that survives renaming.

    transformers keeps experts stacked, and on disk their weights and others' have other names. The output
    head is left alone, as in all published checkpoints; routers are no linear layers in transformers.
    """
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    experts = [p for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for parameter in (*linear, *experts):
            parameter.fill_(1)


def marked(saved: dict[str, torch.Tensor]) -> set[str]:
    """The names under which they were saved; experts that are stacked on disk too are not quantized there."""
    return {name for name, tensor in saved.items() if tensor.dim() == 2 and bool((tensor == 1).all())}


def quantized(weights: dict[str, torch.Tensor], linear: set[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights, those of linear layers as float8 with a scale for each block, and their quantization_config.

    As in transformers, what is no whole number of blocks stays as it is.
    """
    found: dict[str, torch.Tensor] = {}
    left_alone: list[str] = []
    for name, tensor in weights.items():
        found[name] = tensor
        if name not in linear:
            continue
        if any(n % BLOCK for n in tensor.shape):
            left_alone.append(name.removesuffix(".weight"))
            continue
        found[name] = tensor.to(torch.float8_e4m3fn)
        # Any numbers do: what is compared is where they go.
        generator = torch.Generator().manual_seed(len(found))
        found[f"{name}_scale_inv"] = torch.rand([n // BLOCK for n in tensor.shape], generator=generator)
    return found, {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *left_alone],
    }
