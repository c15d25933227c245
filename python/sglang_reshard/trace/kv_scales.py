"""Scales of the KV cache, which SGLang keeps as parameters of attention layers, and most checkpoints do not have."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch

from sglang_reshard.trace.loader import Pass
from sglang_reshard.trace.program import Step

_NAMES = ("k_scale", "v_scale")
_HOOK = "process_weights_after_loading"


def is_scale(name: str, parameter: torch.Tensor) -> bool:
    return name.rpartition(".")[2] in _NAMES and parameter.numel() == 1


def is_default_scale(name: str, parameter: torch.Tensor) -> bool:
    """Returns whether a parameter is a scale as SGLang leaves it for a checkpoint without one: 1, or not yet set.

    Any other value was loaded, and an update that does not bring one would leave it stale.
    """
    if not is_scale(name, parameter):
        return False
    return parameter.device.type == "meta" or float(parameter) == 1.0 or float(parameter) < 0.0


class Run(Pass):
    """Takes over new scales as loading does: attention reads copies of them, as Python numbers."""

    def last(self, written: Collection[str]) -> Sequence[Step]:
        steps = []
        for path, module in self.model.named_modules():
            take_over = getattr(getattr(module, "quant_method", None), _HOOK, None)
            if take_over is not None and any(f"{path}.{name}" in written for name in _NAMES):
                steps.append(Step(path, _HOOK, functools.partial(take_over, module)))
        return steps
