"""Flags that say that a module's parameters were changed in place once they were loaded.

`if not self.converted: self.weight.data.copy_(...); self.converted = True` must run again on new weights, whether it is
part of loading or of the first forward pass. Such flags are recognized by the method that sets them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from sglang_reshard.trace.code_uses import methods_of
from sglang_reshard.trace.program import Step

UNFOLD = "unfold"  # the description of the steps
_FLAGS = "_reshard_flags"  # the attribute of a model that has what `remember_built` has found


class Flag(NamedTuple):
    """A flag that was False when the model was built, in the attributes of the module at `path`."""

    path: str
    attributes: dict[str, Any]
    name: str

    @property
    def is_set(self) -> bool:
        return self.attributes.get(self.name) is True

    def put(self, value: bool) -> None:
        self.attributes[self.name] = value


def remember_built(model: torch.nn.Module) -> None:
    """Must be called when `model` has been built, before it is loaded."""
    vars(model)[_FLAGS] = _found(model)


def flags_of(model: torch.nn.Module) -> list[Flag]:
    """Returns the flags that `remember_built` has found in a model or in its parts; now, if it was not called."""
    parts = [module for module in model.modules() if _FLAGS in vars(module)]
    if not parts:
        remember_built(model)
        parts = [model]
    return [flag for module in parts for flag in vars(module)[_FLAGS]]


def unfold_steps(flags: Sequence[Flag], set_by_loader: Collection[str]) -> list[Step]:
    """Returns the steps that come before all others: parameters are then as the loader has written them.

    set_by_loader  paths and names of the flags that the loader sets while it writes, by `label`
    """

    def step(flag: Flag) -> Step:
        value = label(flag) in set_by_loader
        return Step(flag.path, UNFOLD, lambda: flag.put(value))

    return [step(flag) for flag in flags]


def label(flag: Flag) -> str:
    return f"{flag.path}.{flag.name}" if flag.path else flag.name


def _found(model: torch.nn.Module) -> list[Flag]:
    return [
        Flag(path, vars(module), name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is False and name != "training" and _folds_weights(module, name)
    ]


def _folds_weights(module: torch.nn.Module, flag: str) -> bool:
    """Returns whether a method of `module` sets the attribute `flag` and changes parameters in place."""
    parameters = set(module._parameters)
    return any(flag in uses.stores and uses.writes_in_place(parameters) for uses in methods_of(type(module)).values())
