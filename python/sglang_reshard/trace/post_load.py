"""Defers a loader's `post_load_weights` calls until an update has brought the weights that they compute with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.lazy_tensor import LazyTensor
from sglang_reshard.trace.loader import Pass
from sglang_reshard.trace.program import Step
from sglang_reshard.trace.recorder import map_leaves

_HOOK = "post_load_weights"


class DeferredCall(NamedTuple):
    """A call of `post_load_weights` that the loader made on the module at `path`."""

    path: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Run(Pass):
    """Collects the calls of `post_load_weights` instead of making them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.deferred: list[DeferredCall] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        hooked: list[torch.nn.Module] = []
        for path, module in self.model.named_modules():
            if not callable(getattr(module, _HOOK, None)) or _HOOK in vars(module):
                continue

            def defer(*args: Any, _path: str = path, _module: torch.nn.Module = module, **kwargs: Any) -> None:
                self.deferred.append(DeferredCall(_path, _module, args, kwargs))

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
        for call in self.deferred:
            map_leaves(_check_argument, (call.args, call.kwargs))
        tensors = _tensor_attributes(self.model) if self.deferred else []
        return [_step(call, tensors) for call in self.deferred]


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


def _step(call: DeferredCall, tensors: Sequence[_Attribute]) -> Step:
    def run() -> None:
        call.module.post_load_weights(*call.args, **call.kwargs)  # type: ignore[operator]
        for table, key, tensor in tensors:
            now = table.get(key)
            if now is tensor or not isinstance(now, torch.Tensor):
                continue
            if now.shape == tensor.shape and now.dtype == tensor.dtype:
                tensor.data.copy_(now.data)
                table[key] = tensor

    return Step(call.path, _HOOK, run)
