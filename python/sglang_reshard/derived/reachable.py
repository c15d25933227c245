"""Finds everything that a model keeps values in: attributes, buffers, containers, helper objects, closures, globals.

A `Table` is one of them. `tables` walks from the model over all modules, over the objects, containers and functions in
their attributes, and over the globals of the Python modules that define their classes.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reshard.trace.live import OWN_ATTRIBUTES

_REGISTERS = ("_parameters", "_buffers")
_DEPTH = 8  # of objects within objects
# Packages whose objects keep no state of a model, or state that is not Python's.
_FOREIGN = frozenset((
    "abc", "ast", "asyncio", "builtins", "collections", "concurrent", "contextlib", "copy", "ctypes",
    "dataclasses", "datetime", "enum", "functools", "huggingface_hub", "importlib", "inspect", "io",
    "itertools", "logging", "msgspec", "multiprocessing", "numpy", "operator", "os", "packaging", "pathlib",
    "pydantic", "pydantic_core", "ray", "re", "safetensors", "sglang_reshard", "socket", "sys", "threading",
    "time", "tokenizers", "torch", "transformers", "triton", "types", "typing", "uuid", "warnings", "weakref",
    "zmq",
))  # fmt: skip
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LruCache = type(functools.lru_cache(len))
MISSING = object()  # the value of a key that a table does not have


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Values under keys.

    path     in the model, for messages
    owner    the object whose attributes these are, the function whose closure this is, or the container itself
    entries  the dictionary or list that has the values; for a closure its cells by variable; the function of an
             lru_cache, all of whose results are one value
    keeper   the owner and attribute that have a container; None for other tables
    kind     "attributes", "container", "closure", "globals" or "cache"
    """

    path: str
    owner: Any
    entries: Any
    kind: str
    keeper: tuple[Any, str] | None = None

    @property
    def identity(self) -> Any:
        """The object by whose id the table is known again: the cells of a closure are listed again each time."""
        return self.owner if self.kind == "closure" else self.entries

    def items(self) -> list[tuple[Any, Any]]:
        if self.kind == "cache":
            return [("cache", self.get("cache"))]
        if isinstance(self.entries, Mapping):
            if self.kind == "closure":
                return [(name, _contents(cell)) for name, cell in self.entries.items()]
            return list(self.entries.items())
        return list(enumerate(self.entries))

    def get(self, key: Any) -> Any:
        if self.kind == "cache":
            return list(tensors_in(gc.get_referents(self.entries), 5)) or None
        if self.kind == "closure":
            return _contents(self.entries[key])
        if isinstance(self.entries, Mapping):
            return self.entries.get(key, MISSING)
        return self.entries[key] if key < len(self.entries) else MISSING

    def put(self, key: Any, value: Any) -> None:
        """Sets the value of a key; `MISSING` removes it, and of a list all that follow it, too."""
        if self.kind == "cache":
            self.entries.cache_clear()
        elif self.kind == "closure" and value is MISSING:
            del self.entries[key].cell_contents
        elif self.kind == "closure":
            self.entries[key].cell_contents = value
        elif value is not MISSING:
            self.entries[key] = value
        elif isinstance(self.entries, MutableMapping):
            self.entries.pop(key, None)
        else:
            del self.entries[key:]

    def name(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path else str(key)


def tables(model: torch.nn.Module) -> Iterator[Table]:
    """Yields every table that is reachable from `model`, once."""
    seen = {id(module) for module in model.modules()}
    classes: dict[type, None] = {}
    pending: deque[tuple[str, Any, tuple[Any, str], int]] = deque()
    for path, module in model.named_modules():
        classes[type(module)] = None
        yield from _of_module(path, module, pending)
    while pending:
        path, value, keeper, depth = pending.popleft()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if attributes := getattr(value, "__dict__", None):
                yield Table(path, value, attributes, "attributes")
                _follow(path, attributes.items(), value, depth, pending)
        elif isinstance(value, torch.nn.Module):  # not registered as a child of any other
            classes[type(value)] = None
            for name, module in value.named_modules(prefix=path):
                seen.add(id(module))
                yield from _of_module(name, module, pending)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            function = _unwrapped(value)
            if isinstance(value, (types.MethodType, functools.partial)):
                parts = (getattr(value, "__self__", None), *getattr(value, "args", ()))
                pending.extend((path, part, keeper, depth + 1) for part in parts if not isinstance(part, _SCALARS))
            if isinstance(function, types.FunctionType) and function.__closure__ and not _is_foreign(function):
                cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
                table = Table(path, function, cells, "closure")
                yield table
                _follow(path, table.items(), function, depth, pending)
        elif isinstance(value, (Mapping, list, tuple, deque, set, frozenset)):
            if isinstance(value, (MutableMapping, MutableSequence)):
                yield Table(path, value, value, "container", keeper)
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            _follow(path, items, keeper[0], depth, pending, keeper[1])
        elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not _is_foreign(type(value)):
            classes[type(value)] = None
            yield Table(path, value, attributes, "attributes")
            _follow(path, attributes.items(), value, depth, pending)
    bases = dict.fromkeys(base for kind in classes for base in kind.__mro__ if not _is_foreign(base))
    for base in bases:
        for name, value in list(vars(base).items()):
            if isinstance(value, _LruCache):
                yield Table(f"{base.__qualname__}.{name}", base, value, "cache")
    for name in dict.fromkeys(base.__module__ for base in bases):
        if name in sys.modules:
            yield from _of_globals(sys.modules[name])


def registers(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns the dictionaries that have a module's parameters and buffers."""
    return [vars(module)[register] for register in _REGISTERS]


def tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value: itself, or items and attributes of containers and helper objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in list(value.values()):
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in list(value):
            yield from tensors_in(item, depth - 1)
    elif depth and not isinstance(value, (*_SCALARS, torch.nn.Module, type)) and not callable(value):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not _is_foreign(type(value)):
            yield from tensors_in(attributes, depth - 1)


def _of_module(path: str, module: torch.nn.Module, pending: deque[Any]) -> Iterator[Table]:
    attributes = vars(module)
    for register in registers(module):
        yield Table(path, module, register, "attributes")
        _follow(path, register.items(), module, 0, pending)
    yield Table(path, module, attributes, "attributes")
    _follow(path, ((k, v) for k, v in attributes.items() if k not in OWN_ATTRIBUTES), module, 0, pending)


def _of_globals(python_module: types.ModuleType) -> Iterator[Table]:
    """Yields a Python module's globals, and the containers among them that are not constants of its code."""
    names = vars(python_module)
    yield Table(python_module.__name__, python_module, names, "globals")
    for name, value in list(names.items()):
        path = f"{python_module.__name__}.{name}"
        if isinstance(value, (dict, list)) and not name.startswith("__"):
            yield Table(path, value, value, "container", (python_module, name))
        elif isinstance(value, _LruCache):
            yield Table(path, python_module, value, "cache")


def _follow(
    path: str, items: Iterable[tuple[Any, Any]], owner: Any, depth: int, pending: deque[Any], attribute: str = ""
) -> None:
    for key, value in list(items):
        if not isinstance(value, _SCALARS) and not isinstance(value, type):
            name = f"{path}.{key}" if path else str(key)
            pending.append((name, value, (owner, attribute or str(key)), depth + 1))


def _is_foreign(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _FOREIGN


def _unwrapped(function: Any) -> Any:
    while True:
        inner = getattr(function, "__func__", None) or getattr(function, "func", None)
        if inner is None:
            return function
        function = inner


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later, or never
        return MISSING
