"""Builds SGLang's models on torch's meta device: shapes, dtypes and loaders of a rank, without memory for weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def build_on_meta(device: Any) -> None:
    """Makes this process build SGLang models on the meta device from now on; `device` is SGLang's DeviceConfig.

    For a process that builds nothing else. Single elements, such as the scales of a KV cache, are in host memory
    all the same: SGLang looks at their values before the model is complete. So are tensors for which a module names a
    device itself, see `live_storages`.
    """
    from sglang.srt.model_loader import loader
    from sglang.srt.models import transformers as wrapper  # of transformers' own models

    initialize = loader._initialize_model

    def initialized(*args: Any, **kwargs: Any) -> torch.nn.Module:
        with _WithoutDevices():
            model = initialize(*args, **kwargs)
        _give_values(model)
        return model

    def leave(*_: Any, **__: Any) -> None:
        """Writes no dummy values, and allocates no memory."""

    # It takes parameters on the meta device for those that it has not replaced, and gives them memory and no loader.
    wrapper.TransformersBase._init_parameters = leave
    loader._initialize_model = initialized
    loader.initialize_dummy_weights = leave
    device.device = torch.device("meta")  # SGLang's own class refuses the word


class _WithoutDevices(TorchFunctionMode):
    """Leaves on the meta device what a constructor would put on the GPU by name.

    Makes `torch.tensor` of a number on the CPU: constructors compute with such tensors, and ask for their values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
            options["device"] = "meta"
        # By name: libraries wrap `torch.tensor`.
        elif (
            getattr(func, "__name__", "") == "tensor"
            and device is None
            and args
            and isinstance(args[0], (bool, int, float))
        ):
            options["device"] = "cpu"
        return func(*args, **options)


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
