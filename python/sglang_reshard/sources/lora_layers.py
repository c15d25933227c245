"""Compares the layers of a PEFT model, as they compute now, with an adapter that is served: W + scaling * B @ A.

PEFT's configuration does not tell: adapters may be merged, disabled, combined, scaled, or computed by a variant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.fsdp1 import clean_name

# Subclasses of PEFT's LoraVariant that change only the training.
_PLAIN_VARIANTS = ("MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant")


class BaseWeights(list[tuple[Any, ...]]):
    """The base weights of a PEFT model, into which its layers may merge adapters, also later."""

    def __init__(self, rows: Iterable[tuple[Any, ...]], module: nn.Module) -> None:
        super().__init__(rows)
        self.layers = list(_layers(module))


def merged_adapters(weights: Any) -> tuple[str, ...]:
    """Returns the adapters that are merged into a PEFT model's weights, or into its `base_tensors`, by now."""
    if isinstance(weights, BaseWeights):
        layers: Iterable[tuple[str, Any]] = weights.layers
    else:
        layers = _layers(weights) if isinstance(weights, nn.Module) else ()
    return tuple(dict.fromkeys(adapter for _, layer in layers for adapter in layer.merged_adapters))


def adapted_layers(module: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yields (name, layer) of PEFT's layers that have the adapter."""
    return ((path, layer) for path, layer in _layers(module) if adapter in layer.scaling)


def check_layers(module: nn.Module, adapter: str) -> None:
    """Raises Unsupported unless the layers of a PEFT model compute with the adapter as SGLang would with it alone."""
    if merged := merged_adapters(module):
        raise Unsupported(
            f"the LoRA adapters {', '.join(merged)} are merged into the model's weights; call unmerge_adapter() before "
            f"you send {adapter}, or send the merged weights only"
        )
    layers = list(adapted_layers(module, adapter))
    active = dict.fromkeys(
        name for _, layer in _layers(module) for name in layer.active_adapters if name in layer.scaling
    )
    if adapter in active and len(active) > 1:
        raise Unsupported(
            f"the model computes with the adapters {', '.join(active)} at once, and SGLang with one; call "
            f"set_adapter({adapter!r}), or combine them with add_weighted_adapter"
        )
    config = peft_config(module, adapter)
    for path, layer in layers:
        if layer.disable_adapters:
            raise Unsupported(
                f"{path}: its adapters are disabled; call enable_adapter_layers() before you send {adapter}"
            )
        variant = type(layer.lora_variant[adapter]).__name__ if adapter in getattr(layer, "lora_variant", ()) else ""
        if variant not in ("", *_PLAIN_VARIANTS) or getattr(layer, "use_dora", {}).get(adapter):
            raise Unsupported(
                f"{path}: SGLang does not serve adapters that {variant or 'DoRA'} computes; train without it, or merge "
                "the adapter into the weights"
            )
        expected = _scaling(config, layer, adapter)
        if not math.isclose(layer.scaling[adapter], expected, rel_tol=1e-6):
            raise Unsupported(
                f"{path} scales the adapter {adapter} by {layer.scaling[adapter]:g}, but its configuration by "
                f"{expected:g}, as SGLang does: set_scale, scale_layer or a changed configuration. Call "
                "unscale_layer(), or train with that lora_alpha"
            )


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        if hasattr(part, "merged_adapters") and isinstance(getattr(part, "scaling", None), dict):
            yield clean_name(path), part


def peft_config(module: nn.Module, adapter: str) -> Any:
    """Returns PEFT's configuration of an adapter of the module; None if it has none."""
    found = (getattr(part, "peft_config", None) for part in module.modules())
    return next((configs[adapter] for configs in found if isinstance(configs, dict) and adapter in configs), None)


def _scaling(config: Any, layer: Any, adapter: str) -> float:
    """Returns what an adapter is scaled by, according to its configuration, or else to the layer's."""
    if config is None:
        rank, alpha, rooted = layer.r[adapter], layer.lora_alpha[adapter], layer.use_rslora.get(adapter)
    else:
        rank, alpha, rooted = config.r, config.lora_alpha, getattr(config, "use_rslora", False)
    return float(alpha / (math.sqrt(rank) if rooted else rank))
