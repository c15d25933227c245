"""Flags that say that a module's parameters were changed in place once they were loaded.

`if not self.converted: self.weight.data.copy_(...); self.converted = True` must run again on new weights, whether it is
part of loading or of the first forward pass. Such flags are recognized by the method that sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_reshard.trace.code_uses import methods_of
from sglang_reshard.trace.loader import FLAGS, Pass
from sglang_reshard.trace.program import Step

UNFOLD = "unfold"  # the description of the steps


class Flag(NamedTuple):
    """A flag that was False when the model was built, in the attributes of the module at `path`."""

    path: str
    attributes: dict[str, Any]
    name: str

    @property
    def is_set(self) -> bool:
        return self.attributes.get(self.name) is True

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    def put(self, value: bool) -> None:
        self.attributes[self.name] = value


def remember_built(model: torch.nn.Module) -> None:
    """Must be called when `model` has been built, before it is loaded."""
    vars(model)[FLAGS] = [
        Flag(path, vars(module), name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is False and name != "training" and _folds_weights(module, name)
    ]


def flags_of(model: torch.nn.Module) -> list[Flag]:
    """Returns the flags that `remember_built` has found in a model or in its parts; now, if it was not called."""
    parts = [module for module in model.modules() if FLAGS in vars(module)]
    if not parts:
        remember_built(model)
        parts = [model]
    return [flag for module in parts for flag in vars(module)[FLAGS]]


class Run(Pass):
    """Clears the flags while a loader runs, and before each update: parameters are then as the loader writes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._flags = [(flag, False) for flag in flags_of(model)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for flag, _ in self._flags:
            flag.put(False)
        yield
        self._flags = [(flag, flag.is_set) for flag, _ in self._flags]

    def first(self) -> Sequence[Step]:
        return [Step(flag.path, UNFOLD, partial(flag.put, value)) for flag, value in self._flags]


def _folds_weights(module: torch.nn.Module, flag: str) -> bool:
    """Returns whether a method of `module` sets the attribute `flag` and changes parameters in place."""
    parameters = set(module._parameters)
    return any(
        flag in uses.stores and uses.writes_in_place(parameters) for uses in methods_of(type(module), flag).values()
    )
