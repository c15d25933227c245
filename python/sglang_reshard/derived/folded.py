"""Flags that say that a module's parameters were changed in place once they were loaded.

`if not self.converted: self.weight.data.copy_(...); self.converted = True` must run again on new weights, whether it is
part of loading or of the first forward pass. Such flags are recognized by the method that sets them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_reshard.derived.laziness import folds_weights

_FLAGS = "_reshard_flags"  # the attribute of a model that has what `remember_built` has found


class Flag(NamedTuple):
    """A flag that was False when the model was built, in the attributes of a module."""

    path: str
    attributes: dict[str, Any]
    name: str

    @property
    def is_set(self) -> bool:
        return self.attributes.get(self.name) is True


def remember_built(model: torch.nn.Module) -> None:
    """Must be called when `model` has been built, before it is loaded."""
    vars(model)[_FLAGS] = _found(model)


def flags_of(model: torch.nn.Module) -> list[Flag]:
    """Returns the flags of a model, or of its parts, that `remember_built` was called with; else those not set now."""
    known = [flag for module in model.modules() for flag in vars(module).get(_FLAGS, ())]
    return known or _found(model)


def _found(model: torch.nn.Module) -> list[Flag]:
    return [
        Flag(f"{path}.{name}" if path else name, vars(module), name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is False and name != "training" and folds_weights(module, name)
    ]
