"""Compares the layers of a PEFT model, as they compute now, with an adapter that is served: W + scaling * B @ A.

PEFT's configuration does not tell: adapters may be merged, disabled, combined, scaled, or computed by a variant.

PEFT wraps the module of stacked experts once for each parameter (`target_parameters`), and stacks their matrices:

    lora_A    [experts * r, inputs]: the rows of one expert after the other's
    lora_B    [outputs, r * experts]: column k * experts + e is column k of expert e

SGLang reads the adapter of a checkpoint with an expert's number in each name. Both matrices are passed as fused tensors
with a slice for each expert: nothing is copied.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.fsdp1 import clean_name
from sglang_reshard.sources.fused import FusedSlice, FusedTensor

_OF_EXPERTS = ("gate_up_proj", "down_proj")  # parameters of experts
_WRAPPED = re.compile(r"(\.base_layer)+$")
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
        if config is None:
            rank, alpha, rooted = layer.r[adapter], layer.lora_alpha[adapter], layer.use_rslora.get(adapter)
        else:
            rank, alpha, rooted = config.r, config.lora_alpha, getattr(config, "use_rslora", False)
        expected = float(alpha / (math.sqrt(rank) if rooted else rank))
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


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A parameter of stacked experts that an adapter adapts.

    name  of the experts' module, in PEFT's checkpoints
    """

    name: str
    parameter: str
    experts: int

    def split(self, matrix: str, tensor: torch.Tensor) -> tuple[torch.Tensor, FusedTensor]:
        """Returns lora_A or lora_B (`matrix`) as a fused tensor of all experts' matrices, and its slices."""
        rows, columns = tensor.shape
        if matrix == "A":
            return tensor, _slices(self, matrix, rows // self.experts, columns)
        rank = columns // self.experts
        return tensor.detach().view(rows, rank, self.experts), _slices(self, matrix, rows, rank)


# Cached, as the same objects tell an update that nothing has changed.
@functools.lru_cache(maxsize=8192)
def _slices(of: StackedExperts, matrix: str, rows: int, columns: int) -> FusedTensor:
    """Returns the slices of the experts' matrices, which have `rows` and `columns`."""
    found = []
    for e in range(of.experts):
        part = FusedSlice((0, 0, e), (rows, columns, e + 1), (0, 1))
        if matrix == "A":
            part = FusedSlice((e * rows, 0), ((e + 1) * rows, columns), (0, 1))
        found.append((f"{of.name}.{e}.{of.parameter}.lora_{matrix}.weight", part))
    return FusedTensor(tuple(found))


def stacked_experts(module: nn.Module) -> Mapping[str, StackedExperts]:
    """Returns the parameters of experts that PEFT has wrapped, by the name of the wrapper.

    Raises Unsupported, naming the parameter, for one whose matrices SGLang would not compute with as PEFT does.
    """
    of_wrapper = ("parameter_name", "num_experts", "lora_A", "get_base_layer")
    named = ((clean_name(path), part) for path, part in module.named_modules())
    return {path: _stacked(path, part) for path, part in named if all(hasattr(part, name) for name in of_wrapper)}


def _stacked(path: str, wrapper: Any) -> StackedExperts:
    name, parameter, base = _WRAPPED.sub("", path), wrapper.parameter_name, wrapper.get_base_layer()
    where = f"the adapter of {name}.{parameter}"
    if not is_of_experts(f"{name}.{parameter}"):
        raise Unsupported(_other_parameter(where))
    # transformers states these of every module of experts.
    if getattr(base, "is_transposed", None) is not False or getattr(base, "is_concatenated", None) is not True:
        raise Unsupported(
            f"{where}: SGLang takes adapters of experts whose weights are [experts, outputs, inputs], with all rows of "
            f"the gate before those of the up projection, and {type(base).__name__} does not state this "
            "(is_transposed=False, is_concatenated=True). Merge the adapter into the weights"
        )
    return StackedExperts(name, parameter, wrapper.num_experts)


def is_of_experts(parameter: str) -> bool:
    """Returns whether a parameter that PEFT adapts is one of stacked experts that SGLang serves adapters of."""
    *_, owner, last = f".{parameter}".split(".")
    return owner == "experts" and last in _OF_EXPERTS


def target_modules(target_parameters: Any) -> set[str]:
    """Returns SGLang's names for PEFT's `target_parameters`.

    Raises Unsupported for parameters that are not of experts.
    """
    given = [target_parameters] if isinstance(target_parameters, str) else list(target_parameters)
    for parameter in given:
        if not is_of_experts(parameter):
            raise Unsupported(_other_parameter(f"target_parameters with {parameter!r}"))
    return {parameter.rpartition(".")[2] for parameter in given}


def _other_parameter(where: str) -> str:
    return (
        f"{where}: of parameters that are no module's weight, SGLang serves adapters of experts.gate_up_proj and "
        "experts.down_proj only; train without it, or merge the adapter into the weights"
    )
