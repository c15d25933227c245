"""Whether a model's live tensors changed, asked at every update: of a large model, without a walk over its modules.

`live_signature` walks in Python, tens of milliseconds for thousands of modules. `LiveSignature` remembers
what such a walk came by, and looks through that in whole columns (the names of all attributes, the types of
all values, all addresses), which `map` and `chain` read without Python code for each. Any difference, also
one that the signature may turn out not to care for, leads to a new walk.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from sglang_reshard.sources.tensor_fingerprint import TensorFingerprint
from sglang_reshard.trace.live import OWN_ATTRIBUTES, live_tensors, signature_of

_alive = weakref.ref.__call__
_flatten = chain.from_iterable
_REGISTERS = tuple(map(operator.itemgetter, ("_parameters", "_buffers", "_modules")))
_values: Callable[[Any], Iterable[Any]] = operator.methodcaller("values")


class LiveSignature:
    """`live_signature(model)`, for a model that seldom changes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._found: _Found | None = None
        self._signature = 0

    def current(self) -> int:
        if self._found is None or not self._found.unchanged():
            tensors = list(live_tensors(self._model))
            self._signature = signature_of(tensors)
            # A tensor that is not strided has no address to know it by.
            strided = all(tensor.layout is torch.strided for _, tensor in tensors)
            self._found = _Found(list(self._model.modules())) if strided else None
        return self._signature


class _Found:
    """What a walk came by. Keeps no module and no tensor alive.

    While all names and types stay what they are, tensors are where they were among the values, under the same
    paths. Whether they are the same objects does not matter then, if they are in the same places in memory.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
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
        self._held, items = self._contents(values)
        self._tensor_items = _indices(map(type, items), torch.Tensor)
        self._places = TensorFingerprint(self._all_tensors(values, items))

    def unchanged(self) -> bool:
        modules: list[Any] = list(map(_alive, self._modules))
        if type(None) in set(map(type, modules)):
            return False
        attributes, registers = _dicts(modules)
        if (_names(attributes), _names(registers)) != self._names:
            return False
        values = self._values_in(attributes, registers)
        if list(map(type, values)) != self._types:
            return False
        # All modules are alive: the id of one of them is nobody else's.
        if list(map(id, _pick(values, self._children))) != self._child_ids:
            return False
        held, items = self._contents(values)
        return held == self._held and self._places.same(self._all_tensors(values, items))

    def _values_in(self, attributes: Sequence[Mapping[str, Any]], registers: Sequence[Mapping[str, Any]]) -> list[Any]:
        """All attributes that could be live tensors or hold some, parameters, buffers and children."""
        of_attributes = map(operator.getitem, _flatten(map(repeat, attributes, self._counts)), self._wanted)
        return [*of_attributes, *_flatten(map(_values, filter(None, registers)))]

    def _contents(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """The lengths, keys and types of what lists, tuples and dicts hold, and what they hold."""
        sequences, mappings = _pick(values, self._sequences), _pick(values, self._mappings)
        items = [*_flatten(sequences), *_flatten(map(_values, mappings))]
        return (list(map(len, sequences)), _names(mappings), list(map(type, items))), items

    def _all_tensors(self, values: Sequence[Any], items: Sequence[Any]) -> list[torch.Tensor]:
        return _pick(values, self._tensors) + _pick(items, self._tensor_items)


def _dicts(modules: Sequence[torch.nn.Module]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All modules' attributes; all their parameters, buffers and children."""
    attributes = list(map(vars, modules))
    return attributes, list(_flatten(map(register, attributes) for register in _REGISTERS))


def _names(dicts: Sequence[Mapping[Any, Any]]) -> tuple[list[int], list[Any]]:
    return list(map(len, dicts)), list(_flatten(filter(None, dicts)))


def _indices(types: Iterable[type], kind: type | tuple[type, ...]) -> list[int]:
    return [i for i, t in enumerate(types) if issubclass(t, kind)]


def _pick(values: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return list(map(values.__getitem__, indices))
