"""Modules as they were built, before anything was loaded into them and their quantization method repacked it.

A quantization method may transpose, shuffle, pack or quantize a module's parameters after loading
(`process_weights_after_loading`). Loaders do not know them afterwards. `remember` keeps a module's former state: its
attributes, and its parameters without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_reshard.trace.live import REGISTERS, storage_key
from sglang_reshard.trace.loader import BUILT

HELPERS = ("quant_method", "scheme")  # attributes of a module whose objects keep state of its post-processing


@dataclass(frozen=True, slots=True, eq=False)
class BuiltModule:
    """A module as it was built, before anything was loaded into it.

    attributes  without the registers of parameters, buffers and children
    parameters  on the meta device, with the attributes that loaders need
    buffers     as they are
    helpers     class and attributes of the objects in `HELPERS`, by name
    process     the post-processing
    reorders    returns whether it has moved elements of a live module although its parameters look as they were
    copied      it keeps a copy of a parameter in another form, see `note_copies`
    """

    attributes: dict[str, Any]
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    helpers: dict[str, tuple[type, dict[str, Any]]]
    process: Callable[[torch.nn.Module], None]
    reorders: Callable[[torch.nn.Module], bool]
    copied: bool = False

    def differs(self, module: torch.nn.Module) -> bool:
        """Returns whether the live module has another layout than loaders know, or more than they fill."""
        live = module._parameters
        if live.keys() != self.parameters.keys():
            return True
        for built, now in ((built, live[name]) for name, built in self.parameters.items()):
            if built is None or now is None:
                if built is not now:
                    return True
            # A parameter was replaced by one of another layout, or without attributes that loaders look for.
            elif _layout(built) != _layout(now) or not vars(built).keys() <= vars(now).keys():
                return True
        return self.copied or self.reorders(module)

    def kind(self, module: torch.nn.Module) -> object:
        """Returns what is equal for modules whose post-processing makes tensors of the same shapes and dtypes."""
        parameters = tuple((name, p is not None and _layout(p)) for name, p in self.parameters.items())
        return type(module), parameters, tuple((name, kind) for name, (kind, _) in self.helpers.items())

    def copy(self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """Returns a module as `module` was built, with the parameters `tensors`.

        It has separate quantization methods, and shares all else. So `module` can generate at the same time.
        """
        made: torch.nn.Module = object.__new__(type(module))
        own = vars(made)
        own.update(self.attributes)
        for name, (kind, attributes) in self.helpers.items():
            own[name] = object.__new__(kind)
            vars(own[name]).update(attributes)
        own["_modules"], own["_buffers"] = dict(module._modules), dict(self.buffers)
        own["_parameters"] = {
            name: None if built is None else _parameter_like(built, tensors[name])
            for name, built in self.parameters.items()
        }
        return made


def remember(
    module: torch.nn.Module,
    process: Callable[[torch.nn.Module], None],
    reorders: Callable[[torch.nn.Module], bool],
) -> None:
    """Must be called when `module` has been built, before it is loaded. See `BuiltModule` for the arguments."""
    if any(p is not None and torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
        return
    attributes = {k: v for k, v in vars(module).items() if k not in REGISTERS}
    twins: dict[str, torch.nn.Parameter | None] = {}
    for name, p in module._parameters.items():
        data = None if p is None else torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        twins[name] = None if p is None or data is None else _parameter_like(p, data)
    helpers = {name: attributes[name] for name in HELPERS if hasattr(attributes.get(name), "__dict__")}
    states = {name: (type(helper), dict(vars(helper))) for name, helper in helpers.items()}
    built = BuiltModule(attributes, twins, dict(module._buffers), states, process, reorders)
    vars(module)[BUILT] = built  # not in a dictionary by module, which what is kept of it would keep alive


def note_copies(model: torch.nn.Module) -> None:
    """Must be called when `model` has been post-processed, before its first forward pass.

    A quantization method may leave a module's parameters as loaders know them, and keep one more tensor that it has
    computed from them: a weight in another dtype. It is recognized by its size.
    """
    for module in model.modules():
        built = built_module(module)
        if built is None or built.copied:
            continue
        before = set(map(id, (*built.attributes.values(), *built.buffers.values())))
        parameters = [p for p in module._parameters.values() if p is not None and p.numel() > 1]
        sizes, memory = {p.numel() for p in parameters}, set(map(storage_key, parameters))
        new = (value for value in (*vars(module).values(), *module._buffers.values()) if id(value) not in before)
        tensors = (value for value in new if isinstance(value, torch.Tensor))
        if any(tensor.numel() in sizes and storage_key(tensor) not in memory for tensor in tensors):
            vars(module)[BUILT] = replace(built, copied=True)


def built_module(module: torch.nn.Module) -> BuiltModule | None:
    """Returns what `remember` has kept; None if it was not called."""
    return vars(module).get(BUILT)


def forget(module: torch.nn.Module) -> None:
    """Must be called if a module's parameters are no longer loaded and post-processed."""
    vars(module).pop(BUILT, None)


@contextmanager
def modules_as_built(modules: Sequence[tuple[torch.nn.Module, BuiltModule]]) -> Iterator[frozenset[int]]:
    """In its block the modules are as they were built. Yields the storages of their parameters, by `storage_key`."""
    live = [(vars(module), dict(vars(module))) for module, _ in modules]
    try:
        for module, built in modules:
            attributes, children = vars(module), module._modules
            attributes.clear()
            attributes.update(
                built.attributes, _parameters=dict(built.parameters), _buffers=dict(built.buffers), _modules=children
            )
        yield frozenset(storage_key(p) for _, built in modules for p in built.parameters.values() if p is not None)
    finally:
        for attributes, saved in live:
            attributes.clear()
            attributes.update(saved)


def _parameter_like(like: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Returns a parameter of the same class and attributes, which loaders and post-processing go by."""
    made: torch.nn.Parameter = torch.Tensor._make_subclass(type(like), data, False)
    vars(made).update(vars(like))
    return made


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
