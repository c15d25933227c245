"""Remembers a model's state when it has just been loaded, and finds what differs from it.

Values that differ later were made by a forward pass, or set by the engine: a model that has just been loaded has none
of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sglang_reshard.derived.live_signature import Writes
from sglang_reshard.derived.reachable import MISSING, Table, registers, tables, tensors_in
from sglang_reshard.trace.live import storage_key

RESTART = "Start the engine with disable_cuda_graph=True"  # where state cannot be computed again in place
_LOADED = "_reshard_loaded"  # the attribute of a model that has its LoadedState
_SCALARS = (type(None), bool, int, float, complex, str)
_OTHER = object()  # a value that is not kept, as it is not restored


class Change(NamedTuple):
    """A value that differs from the model's when it had been loaded.

    before  the value that it had then; `MISSING` if it had none
    how     "appeared", "replaced" if a tensor was there that no longer is, "written" if the tensor was changed in place
    """

    table: Table
    key: Any
    before: Any
    how: str

    @property
    def path(self) -> str:
        return self.table.name(self.key)

    @property
    def value(self) -> Any:
        return self.table.get(self.key)

    def restore(self) -> None:
        if self.how == "appeared":
            self.table.put(self.key, self.before)


class LoadedState:
    """Records the state of `model` just after loading. Keeps no tensor alive that the model drops later."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self.writes = Writes()
        for table in tables(model):
            values = dict(table.items())
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    values[key] = _OTHER if value.is_inference() else self.writes.watch(value)
                elif isinstance(value, torch.nn.Module):
                    values[key] = _OTHER
            # The object is referred to, so that its id stays its own.
            self._known[id(table.identity)] = table.identity, values
        self.writes.accept()

    def changes(self, model: torch.nn.Module) -> list[Change]:
        """Returns what differs."""
        found, self._memory = [], set[int]()
        accepted = self.writes.accepted()
        for table in tables(model):
            if (loaded := self._known.get(id(table.identity))) is None:
                continue  # what leads to it has appeared
            for key, value in table.items():
                before = loaded[1].get(key, MISSING)
                how = self._how(before, value, accepted)
                if how and key != _LOADED:
                    found.append(Change(table, key, MISSING if how != "appeared" else before, how))
                loaded_anew = how == "replaced" and isinstance(value, torch.nn.Parameter)
                if isinstance(value, torch.Tensor) and (how in ("", "written") or loaded_anew):
                    self._memory.add(storage_key(value))
        return found

    def new_tensors(self, change: Change) -> list[torch.Tensor]:
        """Returns the tensors in a value of `changes`, but for those in memory that the model had."""
        value = change.value
        is_new = isinstance(value, torch.nn.Module) and id(vars(value)) not in self._known
        tensors = tensors_in(value, new=is_new)
        if change.how == "written":
            return list(tensors)
        return [t for t in tensors if t.numel() and storage_key(t) not in self._memory]

    def _how(self, before: Any, value: Any, accepted: Mapping[int, int]) -> str:
        """Returns how a value differs; empty if it does not."""
        if isinstance(before, weakref.ref):
            was: torch.Tensor | None = before()
            if was is not None and value is was:
                return "written" if accepted.get(id(was), was._version) != was._version else ""
            same = isinstance(value, torch.Tensor) and was is not None and storage_key(value) == storage_key(was)
            return "" if same else "replaced"
        if before is _OTHER or value is before:
            return ""
        if isinstance(value, _SCALARS) and type(value) is type(before) and value == before:
            return ""
        cached = type(value) is list is type(before)  # results of a cache are listed each time
        return "" if cached and list(map(id, value)) == list(map(id, before)) else "appeared"

    def replaces_parameter(self, change: Change) -> bool:
        """Returns whether the module had a parameter or buffer of this name: the model does not run without it."""
        if change.table.kind != "attributes" or not isinstance(change.table.owner, torch.nn.Module):
            return False
        loaded = [self._known.get(id(register), (None, {}))[1] for register in registers(change.table.owner)]
        return any(isinstance(values.get(change.key), weakref.ref) for values in loaded)


def remember_loaded(model: torch.nn.Module) -> None:
    """Must be called when `model` has been loaded, before its first forward pass."""
    vars(model)[_LOADED] = LoadedState(model)


def loaded_state(model: torch.nn.Module) -> LoadedState | None:
    """Returns what `remember_loaded` has kept; None if it was not called."""
    return vars(model).get(_LOADED)
