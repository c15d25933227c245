"""Detects, at every update, changes of a model's live tensors, after which its loader must be traced again.

A walk over all modules in Python takes tens of milliseconds for thousands of them. `LiveSignature` keeps the result of
such a walk and compares it column by column (the names of all attributes, the types of all values, all addresses), with
`map` and `chain` instead of Python code per module. Any difference, even one that does not change the signature, leads
to a new walk. `Writes` notices changes of values, as far as torch counts them.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from sglang_reshard.sources.memory_identity import MemoryFingerprint
from sglang_reshard.trace.live import OWN_ATTRIBUTES, REGISTERS, live_tensors

_alive = weakref.ref.__call__
_version = operator.attrgetter("_version")
_flatten = chain.from_iterable
_REGISTERS = tuple(map(operator.itemgetter, REGISTERS))
_values: Callable[[Any], Iterable[Any]] = operator.methodcaller("values")


class LiveSignature:
    """A number that changes when a live tensor is moved, reshaped, added or removed.

    Comparable within one process only. Independent of the tensors' values, and of further paths to a tensor: MLA adds
    one to a parameter in its first forward pass. Keeps no submodule and no tensor alive.

    While all names and types are unchanged, tensors are at the same positions among the values and under the same
    paths. They need not be the same objects then, only at the same addresses.

    walk  number of the last walk over all modules: another one has found a difference
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known = False
        self._signature = 0
        self.walk = 0

    def current(self) -> int:
        if not self._known or not self._unchanged():
            self.walk += 1
            tensors = list(live_tensors(self._model))
            first_path: dict[tuple[object, ...], str] = {}
            for path, t in tensors:
                if t.layout is torch.strided:
                    first_path.setdefault((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype), path)
            self._signature = hash(tuple(first_path.items()))  # of a tuple, so that the order counts
            # A tensor that is not strided has no address to be recognized by.
            self._known = all(tensor.layout is torch.strided for _, tensor in tensors)
            if self._known:
                self._remember(list(self._model.modules()))
        return self._signature

    def _remember(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = list(map(weakref.ref, modules))
        attributes, registers = _dicts(modules)
        self._names = _names(attributes), _names(registers)
        wanted = [[name for name in a if name not in OWN_ATTRIBUTES] for a in attributes]
        self._counts, self._wanted = list(map(len, wanted)), list(_flatten(wanted))
        values = self._values_in(attributes, registers)
        self._types = list(map(type, values))
        self._children = _indices(self._types, torch.nn.Module)
        self._child_ids = list(map(id, _pick(values, self._children)))
        self._tensors = _indices(self._types, torch.Tensor)
        self._sequences = _indices(self._types, (list, tuple))
        self._mappings = _indices(self._types, dict)
        self._contents, items = self._contents_of(values)
        self._tensor_items = _indices(map(type, items), torch.Tensor)
        self._fingerprint = MemoryFingerprint(self._all_tensors(values, items))

    def _unchanged(self) -> bool:
        modules: list[Any] = list(map(_alive, self._modules))
        if type(None) in set(map(type, modules)):
            return False
        attributes, registers = _dicts(modules)
        if (_names(attributes), _names(registers)) != self._names:
            return False
        values = self._values_in(attributes, registers)
        if list(map(type, values)) != self._types:
            return False
        # All modules are alive, so that no other object can have the id of one of them.
        if list(map(id, _pick(values, self._children))) != self._child_ids:
            return False
        contents, items = self._contents_of(values)
        return contents == self._contents and self._fingerprint.matches(self._all_tensors(values, items))

    def _values_in(self, attributes: Sequence[Mapping[str, Any]], registers: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Returns all attributes but torch's own, then all parameters, buffers and children."""
        of_attributes = map(operator.getitem, _flatten(map(repeat, attributes, self._counts)), self._wanted)
        return [*of_attributes, *_flatten(map(_values, filter(None, registers)))]

    def _contents_of(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Returns the lengths, keys and types of the items of all lists, tuples and dicts, and the items."""
        sequences, mappings = _pick(values, self._sequences), _pick(values, self._mappings)
        items = [*_flatten(sequences), *_flatten(map(_values, mappings))]
        return (list(map(len, sequences)), _names(mappings), list(map(type, items))), items

    def _all_tensors(self, values: Sequence[Any], items: Sequence[Any]) -> list[torch.Tensor]:
        return _pick(values, self._tensors) + _pick(items, self._tensor_items)


class Writes:
    """Notices writes to tensors, as far as torch counts them. Keeps no tensor alive."""

    def __init__(self) -> None:
        self._watched: list[weakref.ref[torch.Tensor]] = []
        self._versions: list[int] = []

    def watch(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        self._watched.append(weakref.ref(tensor))
        return self._watched[-1]

    def accept(self) -> None:
        """Must be called when new weights are live: no forward pass has made the writes until now."""
        tensors = list(map(_alive, self._watched))
        if type(None) in set(map(type, tensors)):
            self._watched = [ref for ref, tensor in zip(self._watched, tensors, strict=True) if tensor is not None]
            tensors = list(map(_alive, self._watched))
        self._versions = list(map(_version, tensors))

    @property
    def changed(self) -> bool:
        try:
            return list(map(_version, map(_alive, self._watched))) != self._versions
        except AttributeError:  # one is gone
            return True

    def accepted(self) -> dict[int, int]:
        """Returns the count of each tensor's writes that were accepted, by id."""
        return dict(zip(map(id, map(_alive, self._watched)), self._versions, strict=True))


def _dicts(modules: Sequence[torch.nn.Module]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns all modules' attributes, and all modules' registers of parameters, buffers and children."""
    attributes = list(map(vars, modules))
    return attributes, list(_flatten(map(register, attributes) for register in _REGISTERS))


def _names(dicts: Sequence[Mapping[Any, Any]]) -> tuple[list[int], list[Any]]:
    return list(map(len, dicts)), list(_flatten(filter(None, dicts)))


def _indices(types: Iterable[type], kind: type | tuple[type, ...]) -> list[int]:
    return [i for i, t in enumerate(types) if issubclass(t, kind)]


def _pick(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return list(map(values.__getitem__, indices))
