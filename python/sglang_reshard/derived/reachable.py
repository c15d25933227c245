"""Finds everything that a model keeps values in.

A `Table` is one place: attributes, slots, buffers, children, containers, closures, class variables, globals, caches.
`tables` walks from the model over all modules, and over the objects, containers, functions and parameters that they
lead to; then over the variables of their classes, and over the globals of the Python modules that define these and of
those whose functions these import.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reshard.trace.live import OWN_ATTRIBUTES, REGISTERS

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_DEPTH = 8  # of objects within objects
_VALUE_DEPTH = 5  # of tensors within a value
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
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (Mapping, Sequence, Set)
_LruCache = type(functools.lru_cache(len))
MISSING = object()  # the value of a key that a table does not have


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Values under keys.

    path     in the model, for messages
    owner    the object, class or function whose values these are, or the container itself
    entries  the mapping or sequence that has them; the function of an lru_cache, whose results are one value
    keepers  owners and attributes that lead to it, the nearest first; the last one is of a module of the model, of a
             class or of a Python module
    kind     "attributes", "container", "closure", "class", "globals" or "cache"
    """

    path: str
    owner: Any
    entries: Any
    kind: str
    keepers: tuple[tuple[Any, str], ...] = ()

    @property
    def identity(self) -> Any:
        """The object by whose id the table is known again: cells, slots and class variables are listed each time."""
        return self.owner if isinstance(self.entries, Named) else self.entries

    @property
    def is_global(self) -> bool:
        """Returns whether the values are of the process, and not of one model."""
        root = self.keepers[-1][0] if self.keepers else self.owner
        return isinstance(root, (types.ModuleType, type))

    def items(self) -> list[tuple[Any, Any]]:
        if self.kind == "cache":
            return [("cache", self.get("cache"))]
        return list(self.entries.items() if isinstance(self.entries, Mapping) else enumerate(self.entries))

    def get(self, key: Any) -> Any:
        if self.kind == "cache":
            return _results(self.entries)
        if isinstance(self.entries, Mapping):
            return self.entries.get(key, MISSING)
        return self.entries[key] if key < len(self.entries) else MISSING

    def put(self, key: Any, value: Any) -> None:
        """Sets the value of a key; `MISSING` removes it, and of a sequence all that follow it, too."""
        if self.kind == "cache":
            self.entries.cache_clear()
        elif value is not MISSING:
            self.entries[key] = value
        elif isinstance(self.entries, MutableMapping):
            self.entries.pop(key, None)
        else:
            while len(self.entries) > key:
                self.entries.pop()

    def name(self, key: Any) -> str:
        return f"{self.path}.{key}" if self.path else str(key)


class Named(MutableMapping[str, Any]):
    """Values that are elsewhere than in a dictionary: by name, object and attribute. Not each of the names has one."""

    def __init__(self, places: dict[str, tuple[Any, str]]) -> None:
        self.places = places

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.places if self.get(name, MISSING) is not MISSING)

    def __getitem__(self, name: str) -> Any:
        of, attribute = self.places[name]
        try:
            return vars(of)[attribute] if isinstance(of, type) else object.__getattribute__(of, attribute)
        except (AttributeError, ValueError):  # of a slot, of a cell
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        of, attribute = self.places[name]
        # A frozen dataclass has another __setattr__.
        (type if isinstance(of, type) else object).__setattr__(of, attribute, value)

    def __delitem__(self, name: str) -> None:
        of, attribute = self.places[name]
        (type if isinstance(of, type) else object).__delattr__(of, attribute)


def _slots_of(value: Any) -> Named:
    return Named({name: (value, name) for name in _slots(type(value))})


def _variables_of(kind: type) -> Named:
    """Returns those of a class, without its methods and descriptors."""
    of = list(vars(kind).items())
    names = [n for n, v in of if not n.startswith("__") and (isinstance(v, _FUNCTIONS) or not hasattr(v, "__get__"))]
    return Named({name: (kind, name) for name in names})


def _cells_of(function: types.FunctionType) -> Named:
    """Returns those of a function's closure; one that is assigned later, or never, has no value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return Named({name: (cell, "cell_contents") for name, cell in cells})


def tables(model: torch.nn.Module) -> Iterator[Table]:
    """Yields every table that is reachable from `model`, once."""
    walk = _Walk()
    yield from walk.of_modules("", model, ())
    yield from walk.rest()
    known: set[type] = set()
    while classes := [kind for kind in walk.classes if kind not in known]:
        known.update(classes)
        for kind in classes:
            yield from walk.of_definitions(Table(kind.__qualname__, kind, _variables_of(kind), "class"))
        yield from walk.rest()
    for python_module in _python_modules(known):
        yield from walk.of_definitions(Table(python_module.__name__, python_module, vars(python_module), "globals"))
        yield from walk.rest()


class _Walk:
    """A walk: the objects that it has seen, those that it has still to open, and the classes of those it has opened."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # so that no other object gets an id of `_seen`
        self._pending: deque[tuple[str, Any, tuple[tuple[Any, str], ...], int]] = deque()
        self.classes: dict[type, None] = {}

    def of_modules(self, path: str, root: torch.nn.Module, keepers: tuple[tuple[Any, str], ...]) -> Iterator[Table]:
        for name, module in root.named_modules(prefix=path):
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self._note_class(type(module))
            attributes = vars(module)
            for register in registers(module):
                yield Table(name, module, register, "attributes", keepers)
            yield Table(name, module, attributes, "attributes", keepers)
            foreign = (k for k in attributes if not (k in OWN_ATTRIBUTES or k.startswith("_reshard_")))
            own = [(k, attributes[k]) for k in (*_HOOKS, *foreign)]
            for items in (attributes["_parameters"].items(), attributes["_buffers"].items(), own):
                self.follow(name, items, module, keepers, 0)

    def of_definitions(self, table: Table) -> Iterator[Table]:
        """Yields the table of a class or of a Python module, and those of its caches."""
        yield table
        for name, value in list(vars(table.owner).items()):
            if isinstance(value, _LruCache):
                yield Table(table.name(name), table.owner, value, "cache", ((table.owner, name),))
            elif not name.startswith("__") and (table.kind == "class" or _is_defined_by(table.owner, value)):
                value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                self.follow(table.path, [(name, value)], table.owner, (), _DEPTH // 2)

    def rest(self) -> Iterator[Table]:
        """Yields the tables of all that is pending, and those that they lead to."""
        while self._pending:
            path, value, keepers, depth = self._pending.popleft()
            if id(value) in self._seen or depth > _DEPTH:
                continue
            if isinstance(value, torch.nn.Module):  # not registered as a child of any other
                yield from self.of_modules(path, value, keepers)
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            if not isinstance(value, (*_FUNCTIONS, *_CONTAINERS, torch.Tensor)):
                self._note_class(type(value))
            yield from _own_tables(path, value, keepers)
            # A container is known by the attribute that keeps it.
            named = keepers[0][1] if keepers and isinstance(value, _CONTAINERS) else ""
            self.follow(path, parts(value), keepers[0][0] if named else value, keepers, depth, named)

    def follow(
        self,
        path: str,
        items: Iterable[tuple[Any, Any]],
        owner: Any,
        keepers: tuple[tuple[Any, str], ...],
        depth: int,
        attribute: str = "",
    ) -> None:
        for key, value in list(items):
            if not isinstance(value, _SCALARS) and not isinstance(value, type):
                name = f"{path}.{key}" if path else str(key)
                kept = keepers[1:] if attribute else keepers
                self._pending.append((name, value, ((owner, attribute or str(key)), *kept), depth + 1))

    def _note_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base not in self.classes and not _is_foreign(base):
                self.classes[base] = None


def _is_defined_by(python_module: types.ModuleType, value: Any) -> bool:
    """Returns whether a global is the Python module's own, and not imported; of containers that is not known."""
    of_it = getattr(value, "__module__", None) if callable(value) else type(value).__module__
    return isinstance(value, _CONTAINERS) or of_it == python_module.__name__


def _own_tables(path: str, value: Any, keepers: tuple[tuple[Any, str], ...]) -> Iterator[Table]:
    """Yields the tables that an object is, or has itself."""
    if isinstance(value, (MutableMapping, MutableSequence)):
        yield Table(path, value, value, "container", keepers)
    elif isinstance(value, types.FunctionType) and value.__closure__:
        yield Table(path, value, _cells_of(value), "closure", keepers)
    if isinstance(value, _FUNCTIONS) or not isinstance(value, _CONTAINERS):
        if isinstance(attributes := getattr(value, "__dict__", None), dict) and _is_followed(value):
            yield Table(path, value, attributes, "attributes", keepers)
        if _slots(type(value)) and _is_followed(value):
            yield Table(path, value, _slots_of(value), "attributes", keepers)


def parts(value: Any) -> list[tuple[Any, Any]]:
    """Returns what an object holds, by key: items, attributes, slots, variables of closures, bound arguments."""
    if isinstance(value, (*_SCALARS, type, types.ModuleType)):
        return []
    if isinstance(value, torch.Tensor):
        return list(getattr(value, "__dict__", {}).items())
    if isinstance(value, (MutableMapping, types.MappingProxyType)):  # reading another Mapping may make what it has
        return list(value.items())
    if isinstance(value, (Sequence, Set, deque)):
        return list(enumerate(value)) if not isinstance(value, (bytearray, memoryview, range)) else []
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, weakref.ref):
        return [("referent", value())]
    if isinstance(value, types.GeneratorType):
        return list(value.gi_frame.f_locals.items()) if value.gi_frame is not None else []
    if not _is_followed(value):
        return []
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = zip(reversed(names), reversed(value.__defaults__ or ()), strict=False)
        cells = _cells_of(value).items() if value.__closure__ else ()
        return [*cells, *defaults, *(value.__kwdefaults__ or {}).items(), *vars(value).items()]
    attributes = getattr(value, "__dict__", None)
    return [*(attributes.items() if isinstance(attributes, dict) else ()), *_slots_of(value).items()]


def _results(cache: Any) -> list[Any] | None:
    """Returns those results of an lru_cache that hold tensors or numbers."""
    found = [r for r in gc.get_referents(cache) if r is not vars(cache) and not isinstance(r, (type, *_FUNCTIONS))]
    arguments = {id(key) for r in found if type(r) is dict for key in r}
    return [r for r in found if id(r) not in arguments and next(_leaves(r), None) is not None] or None


def registers(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns the dictionaries that have a module's parameters, buffers and children."""
    return [vars(module)[register] for register in REGISTERS]


def tensors_in(value: Any, new: bool = False) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value: itself, or those that it holds. new: also those of a module that it is."""
    return (found for found in _leaves(value, new) if isinstance(found, torch.Tensor))


def numbers_in(value: Any, in_objects: bool = True) -> list[Any]:
    """Returns the numbers that are not whole in a value: itself, or those that it holds. A numpy array counts as one.

    in_objects  also in attributes of other objects than containers and functions, such as configurations
    """
    return [found for found in _leaves(value, in_objects=in_objects) if not isinstance(found, torch.Tensor)]


def _leaves(value: Any, new: bool = False, in_objects: bool = True) -> Iterator[Any]:
    """Yields tensors and numbers. new: descends into the module that it is; into no other."""
    seen: set[int] = set()
    pending = deque([(value, _VALUE_DEPTH)])
    if new and isinstance(value, torch.nn.Module):
        for m in value.modules():
            own = [v for k, v in vars(m).items() if k not in OWN_ATTRIBUTES]
            parts_of = (*m.parameters(recurse=False), *m.buffers(recurse=False), *own)
            pending.extend((part, _VALUE_DEPTH - 1) for part in parts_of)
    while pending:
        part, depth = pending.popleft()
        if isinstance(part, (torch.Tensor, float, complex)) or type(part).__module__ == "numpy":
            yield part
        if not in_objects and not isinstance(part, (*_FUNCTIONS, *_CONTAINERS, types.GeneratorType)):
            continue
        if depth and id(part) not in seen and not isinstance(part, torch.nn.Module):
            seen.add(id(part))
            pending.extend((inner, depth - 1) for _, inner in parts(part))


def _python_modules(classes: Iterable[type]) -> list[types.ModuleType]:
    """Returns the Python modules of these classes, and those of their package whose functions they import."""
    found = {sys.modules[kind.__module__]: None for kind in classes if kind.__module__ in sys.modules}
    for python_module in list(found):
        package = python_module.__name__.partition(".")[0]
        for value in list(vars(python_module).values()):
            name = str(getattr(value, "__module__", "")) if isinstance(value, types.FunctionType) else ""
            if name.partition(".")[0] == package and name in sys.modules:
                found[sys.modules[name]] = None
    return list(found)


def _find_slots(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ()) if not _is_foreign(base) else ()
        for name in (declared,) if isinstance(declared, str) else tuple(declared):
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


_slots: Callable[[type], tuple[str, ...]] = functools.cache(_find_slots)


def _is_followed(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, types.SimpleNamespace)):
        return True
    return not _is_foreign(value if isinstance(value, _FUNCTIONS) else type(value))


def _is_foreign(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _FOREIGN
