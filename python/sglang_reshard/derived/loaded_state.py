"""Remembers a model's state when it has just been loaded, and finds what has appeared since.

Values that appear later were made by a forward pass, or set by the engine: a model that has just been loaded has none
of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sglang_reshard.derived.laziness import is_lazy
from sglang_reshard.derived.reachable import MISSING, Table, registers, tables, tensors_in
from sglang_reshard.trace.live import storage_key

_LOADED = "_reshard_loaded"  # the attribute of a model that has its LoadedState
_RESTORABLE = (type(None), bool, int, float, str)
_OTHER = object()  # a value that is not kept, as it is not restored


class Appeared(NamedTuple):
    """A value that a table did not have when the model had been loaded.

    before  the value that it had then; `MISSING` if it had none
    lazy    the model's code makes it again, once it is gone
    """

    table: Table
    key: Any
    before: Any
    lazy: bool

    @property
    def path(self) -> str:
        return self.table.name(self.key)

    def restore(self) -> None:
        self.table.put(self.key, self.before)


class LoadedState:
    """Records the state of `model` just after loading. Keeps no tensor alive that the model drops later."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known: dict[int, tuple[Any, dict[Any, Any] | int]] = {}
        for table in tables(model):
            values: dict[Any, Any] | int
            if isinstance(table.entries, list):
                values = len(table.entries)
            else:
                values = {k: v if isinstance(v, _RESTORABLE) or v is MISSING else _OTHER for k, v in table.items()}
            # The object is referred to, so that its id stays its own.
            self._known[id(table.identity)] = table.identity, values

    def appeared(self, model: torch.nn.Module) -> Iterator[Appeared]:
        """Yields values that have appeared since and have separate memory: no parameter's, and no known tensor's."""
        found, known = [], _Memory(model)
        for table in tables(model):
            before = self._known.get(id(table.identity))
            if before is None:
                continue  # what leads to it has appeared
            for key, value in table.items():
                was = self._value(before[1], key)
                if was is _OTHER:
                    known.add(value)
                elif value is not was and not isinstance(value, _RESTORABLE):
                    found.append((table, key, was, value))
        for table, key, was, value in found:
            if any(not known.has(tensor) for tensor in tensors_in(value)):
                yield Appeared(table, key, was, is_lazy(table, key) and not self._replaces_parameter(table, key))

    def _replaces_parameter(self, table: Table, key: Any) -> bool:
        """Returns whether the module had a parameter or buffer of this name: the model does not run without it."""
        if table.kind != "attributes" or not isinstance(table.owner, torch.nn.Module):
            return False
        loaded = [self._known.get(id(register), (None, {}))[1] for register in registers(table.owner)]
        return any(self._value(values, key) is _OTHER for values in loaded)

    @staticmethod
    def _value(before: dict[Any, Any] | int, key: Any) -> Any:
        if isinstance(before, int):
            return _OTHER if key < before else MISSING
        return before.get(key, MISSING)


class _Memory:
    """Storages that a model had when it had been loaded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._storages = {storage_key(p) for p in model.parameters()}

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._storages.add(storage_key(value))

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or storage_key(tensor) in self._storages


def remember_loaded(model: torch.nn.Module) -> None:
    """Must be called when `model` has been loaded, before its first forward pass."""
    vars(model)[_LOADED] = LoadedState(model)


def loaded_state(model: torch.nn.Module) -> LoadedState | None:
    """Returns what `remember_loaded` has kept; None if it was not called."""
    return vars(model).get(_LOADED)
