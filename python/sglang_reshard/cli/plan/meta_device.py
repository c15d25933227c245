"""Builds SGLang's models on torch's meta device: shapes, dtypes and loaders of a rank, without memory for weights."""

from __future__ import annotations

from typing import Any

import torch


def build_on_meta(device: Any) -> None:
    """Makes this process build SGLang models on the meta device from now on; `device` is SGLang's DeviceConfig.

    For a process that builds nothing else. Single elements, such as the scales of a KV cache, are in host memory
    all the same: SGLang looks at their values before the model is complete.
    """
    from sglang.srt.model_loader import loader

    initialize = loader._initialize_model

    def initialized(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = initialize(*args, **kwargs)
        _give_values(model)
        return model

    def leave(*_: Any, **__: Any) -> None:
        """Writes no dummy values."""

    loader._initialize_model = initialized
    loader.initialize_dummy_weights = leave
    device.device = torch.device("meta")  # SGLang's own class refuses the word


def _give_values(model: torch.nn.Module) -> None:
    """Moves parameters of one element to host memory; nothing else about them changes."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.numel() != 1 or parameter.device.type != "meta":
                continue
            if id(parameter) not in known:
                value = torch.ones(parameter.shape, dtype=parameter.dtype, device="cpu")
                real: Any = torch.Tensor._make_subclass(type(parameter), value, False)
                vars(real).update(vars(parameter))
                known[id(parameter)] = real
            module._parameters[name] = known[id(parameter)]
