"""Recognises state that code makes when it first needs it, by the code's own instructions.

A method that stores an attribute, and checks for it before or is called by one that does, makes it again once it is
gone: `if self._cached is None: self._cached = ...`. An attribute that is only stored, by a constructor, a loader or
another object, is not made again.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sglang_reshard.derived.reachable import Table

# Methods that run once, when a model is built and loaded.
_ONCE = ("__init__", "__new__", "__setstate__", "load_", "post_load", "process_weights", "create_weights", "_load_")
# Methods that somebody else calls, once. Only others of the class may count on them.
_SETUP = ("init", "_init", "set_", "setup", "bind", "configure", "capture", "reserve", "prepare", "register", "reset")
_BASES = (object, torch.nn.Module)
_BY_STRING = {"setattr", "getattr", "hasattr", "register_buffer", "__dict__"}
_IN_PLACE = {"copy_", "mul_", "div_", "add_", "sub_"}
_INTO_CONTAINER = {"setdefault", "append", "update", "insert", "extend", "add"}


class _Uses(NamedTuple):
    """Names that a function loads, stores and calls, with those of the functions inside it."""

    loads: frozenset[str]
    stores: frozenset[str]
    fills_containers: bool


def is_lazy(table: Table, key: Any) -> bool:
    """Returns whether code makes the value under `key` again, once it is gone."""
    if table.kind == "closure":
        uses = _uses(table.owner.__code__)
        return key in uses.loads and key in uses.stores
    if table.kind == "globals":
        return any(key in uses.loads and key in uses.stores for uses in _functions_of(table.owner))
    if table.kind == "cache":
        return True
    if table.kind == "container":
        if table.keeper is None:
            return False
        owner, attribute = table.keeper
        functions = _functions_of(owner) if isinstance(owner, types.ModuleType) else _methods_for(owner)
        return any(attribute in uses.loads and uses.fills_containers for uses in functions)
    return bool(makers(table.owner, key)) or _is_cached_property(type(table.owner), key)


def makers(owner: Any, attribute: str) -> list[str]:
    """Returns the methods of `owner` that make `attribute` when it is needed; "" for those of its helpers."""
    methods = _methods(type(owner))
    found = [
        name
        for name, uses in methods.items()
        if attribute in uses.stores
        and (
            (attribute in uses.loads and not name.startswith(_SETUP))
            or any(
                attribute in caller.loads and name in caller.loads and not of.startswith(_SETUP)
                for of, caller in methods.items()
                if of != name
            )
        )
    ]
    helpers = any(attribute in uses.loads and attribute in uses.stores for uses in _helper_methods(owner))
    return found + [""] * helpers


def folds_weights(module: torch.nn.Module, flag: str) -> bool:
    """Returns whether a method of `module` sets the attribute `flag` and changes parameters in place."""
    parameters = set(module._parameters)
    return any(
        flag in uses.stores and parameters & uses.loads and _IN_PLACE & uses.loads
        for uses in _methods(type(module)).values()
    )


def _methods_for(owner: Any) -> Iterator[_Uses]:
    yield from _methods(type(owner)).values()
    yield from _helper_methods(owner)


def _helper_methods(owner: Any) -> Iterator[_Uses]:
    """Yields the methods of objects in attributes, such as quantization methods, and the functions around the class."""
    for helper in list(getattr(owner, "__dict__", {}).values()):
        if hasattr(helper, "__dict__") and not isinstance(helper, (torch.nn.Module, torch.Tensor, type)):
            yield from _methods(type(helper)).values()
    for base in type(owner).__mro__:
        if base not in _BASES and base.__module__ in sys.modules and not base.__module__.startswith("torch."):
            yield from _functions_of(sys.modules[base.__module__])


def _find_methods(kind: type) -> dict[str, _Uses]:
    """Returns the methods of a class by name, but for those that run once."""
    found: dict[str, _Uses] = {}
    for base in kind.__mro__:
        if base in _BASES or base.__module__ == "builtins":
            continue
        for name, value in vars(base).items():
            code = _code(value)
            if code is not None and name not in found and not name.startswith(_ONCE):
                found[name] = _uses(code)
    return found


_methods: Callable[[type], dict[str, _Uses]] = functools.cache(_find_methods)


@functools.cache
def _functions_of(python_module: types.ModuleType) -> tuple[_Uses, ...]:
    """Returns the functions of a Python module, and the methods of its classes."""
    found: list[_Uses] = []
    for name, value in list(vars(python_module).items()):
        if getattr(value, "__module__", "") != python_module.__name__:
            continue  # imported
        if isinstance(value, type):
            found += [uses for method, uses in _methods(value).items() if not method.startswith(_SETUP)]
        elif (code := _code(value)) is not None and not name.startswith((*_ONCE, *_SETUP)):
            found.append(_uses(code))
    return tuple(found)


def _is_cached_property(kind: type, key: Any) -> bool:
    return any(isinstance(vars(base).get(key), functools.cached_property) for base in kind.__mro__)


def _code(value: Any) -> types.CodeType | None:
    if isinstance(value, property):
        value = value.fget
    for _ in range(8):  # decorators
        value = getattr(value, "__func__", value)
        inner = getattr(value, "__wrapped__", None) or getattr(value, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        value = inner
    code = getattr(value, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


@functools.cache
def _uses(code: types.CodeType) -> _Uses:
    loads, stores, fills = set[str](), set[str](), False
    strings = {constant for constant in code.co_consts if isinstance(constant, str)}
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLOSURE")):
            loads.add(str(instruction.argval))
        elif name.startswith(("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")):
            stores.add(str(instruction.argval))
        elif name.startswith("STORE_SUBSCR"):
            fills = True
    if by_string := loads & _BY_STRING:
        loads |= strings
        if by_string & {"setattr", "register_buffer", "__dict__"}:
            stores |= strings
    fills = fills or bool(loads & _INTO_CONTAINER)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _uses(constant)
            loads |= inner.loads
            stores |= inner.stores
            fills = fills or inner.fills_containers
    return _Uses(frozenset(loads), frozenset(stores), fills)
