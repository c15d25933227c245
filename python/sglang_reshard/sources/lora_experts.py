"""Splits the LoRA adapters of stacked experts, which PEFT trains with `target_parameters`, into one for each expert.

PEFT wraps the module of the experts once for each parameter, and stacks the experts' matrices:

    lora_A    [experts * r, inputs]: the rows of one expert after the other's
    lora_B    [outputs, r * experts]: column k * experts + e is column k of expert e

SGLang reads the adapter of a checkpoint with an expert's number in each name. Both matrices are passed as fused tensors
with a slice for each expert: nothing is copied.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources.fsdp1 import clean_name
from sglang_reshard.sources.fused import FusedSlice, FusedTensor

PARAMETERS = ("gate_up_proj", "down_proj")
_WRAPPED = re.compile(r"(\.base_layer)+$")


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
            return tensor, _slices_of_a(self, rows // self.experts, columns)
        rank = columns // self.experts
        return tensor.detach().view(rows, rank, self.experts), _slices_of_b(self, rows, rank)


# Cached, as the same objects tell an update that nothing has changed.
@functools.lru_cache(maxsize=4096)
def _slices_of_a(stacked: StackedExperts, rank: int, columns: int) -> FusedTensor:
    boxes = ((e, FusedSlice((e * rank, 0), ((e + 1) * rank, columns), (0, 1))) for e in range(stacked.experts))
    return FusedTensor(tuple((_name(stacked, e, "A"), box) for e, box in boxes))


@functools.lru_cache(maxsize=4096)
def _slices_of_b(stacked: StackedExperts, rows: int, rank: int) -> FusedTensor:
    boxes = ((e, FusedSlice((0, 0, e), (rows, rank, e + 1), (0, 1))) for e in range(stacked.experts))
    return FusedTensor(tuple((_name(stacked, e, "B"), box) for e, box in boxes))


def _name(stacked: StackedExperts, expert: int, matrix: str) -> str:
    return f"{stacked.name}.{expert}.{stacked.parameter}.lora_{matrix}.weight"


def stacked_experts(module: nn.Module) -> Mapping[str, StackedExperts]:
    """Returns the parameters of experts that PEFT has wrapped, by the name of the wrapper.

    Raises Unsupported, naming the parameter, for one whose matrices SGLang would not compute with as PEFT does.
    """
    wrappers = ((clean_name(path), part) for path, part in module.named_modules() if _is_wrapper(part))
    return {path: _stacked(path, part) for path, part in wrappers}


def _is_wrapper(part: Any) -> bool:
    return all(hasattr(part, name) for name in ("parameter_name", "num_experts", "lora_A", "get_base_layer"))


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
    return owner == "experts" and last in PARAMETERS


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
