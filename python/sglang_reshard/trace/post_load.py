"""Defers a loader's `post_load_weights` calls until an update has brought the weights that they compute with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.lazy_tensor import LazyTensor
from sglang_reshard.trace.loader import Pass
from sglang_reshard.trace.program import Step
from sglang_reshard.trace.recorder import map_leaves

_HOOK = "post_load_weights"


class Run(Pass):
    """Collects the calls of `post_load_weights` instead of making them, with the paths of the modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.deferred: list[tuple[str, partial[None]]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        hooked: list[torch.nn.Module] = []
        for path, module in self.model.named_modules():
            method: Any = getattr(module, _HOOK, None)
            if not callable(method) or _HOOK in vars(module):
                continue

            def defer(*args: Any, _path: str = path, _method: Any = method, **kwargs: Any) -> None:
                self.deferred.append((_path, partial(_method, *args, **kwargs)))

            vars(module)[_HOOK] = defer
            hooked.append(module)
        try:
            yield
        finally:
            for module in hooked:
                del vars(module)[_HOOK]

    def last(self, written: Collection[str]) -> Sequence[Step]:
        """Returns the steps that make the calls and keep all live tensors at their addresses.

        Raises Unsupported if a call has a lazy tensor among its arguments.
        """
        for _, call in self.deferred:
            map_leaves(_check_argument, (call.args, call.keywords))
        tensors = _tensor_attributes(self.model) if self.deferred else []
        return [Step(path, _HOOK, partial(_run, call, tensors)) for path, call in self.deferred]


def _check_argument(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        raise Unsupported(
            "The loader passes checkpoint tensors to post_load_weights, which cannot be deferred until they have "
            "arrived. Update this model with SGLang's own update_weights_from_tensor."
        )
    return value


# The dictionary that a module keeps a tensor in, the tensor's name there, and the tensor.
_Attribute = tuple[dict[str, Any], str, torch.Tensor]


def _tensor_attributes(model: torch.nn.Module) -> list[_Attribute]:
    found: list[_Attribute] = []
    for module in model.modules():
        attributes = vars(module)
        for table in (attributes, attributes["_parameters"], attributes["_buffers"]):
            found += [(table, k, v) for k, v in table.items() if isinstance(v, torch.Tensor)]
    return found


def _run(call: partial[None], tensors: Sequence[_Attribute]) -> None:
    call()
    for table, key, tensor in tensors:
        now = table.get(key)
        if now is tensor or not isinstance(now, torch.Tensor):
            continue
        if now.shape == tensor.shape and now.dtype == tensor.dtype:
            tensor.data.copy_(now.data)
            table[key] = tensor
