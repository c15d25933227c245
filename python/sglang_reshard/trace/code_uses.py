"""The names that a class's code loads and stores, read from its bytecode."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Methods that run once, when a model is built and loaded.
ONCE = ("__init__", "__new__", "__setstate__", "load_", "post_load", "process_weights", "create_weights", "_load_")
# Methods that somebody else calls, once. Only others of the class may count on them.
SETUP = ("init", "_init", "set_", "setup", "bind", "configure", "capture", "reserve", "prepare", "register", "reset")
_BASES = (object, torch.nn.Module)
_BY_STRING = {"setattr", "getattr", "hasattr", "register_buffer", "__dict__"}
_INTO_CONTAINER = {"setdefault", "append", "update", "insert", "extend", "add"}


class Uses(NamedTuple):
    """Names that a function loads and stores, with those of the functions inside it.

    fills_containers  it puts items into some container
    """

    loads: frozenset[str]
    stores: frozenset[str]
    fills_containers: bool


def _find_methods(kind: type) -> dict[str, Uses]:
    """Returns the methods of a class by name, but for those that run once."""
    found: dict[str, Uses] = {}
    for base in kind.__mro__:
        if base in _BASES or base.__module__ == "builtins":
            continue
        for name, value in vars(base).items():
            code = _code(value)
            if code is not None and name not in found and not name.startswith(ONCE):
                found[name] = uses_of(code)
    return found


methods_of: Callable[[type], dict[str, Uses]] = functools.cache(_find_methods)


@functools.cache
def functions_of(python_module: types.ModuleType) -> tuple[Uses, ...]:
    """Returns the functions of a Python module, and the methods of its classes."""
    found: list[Uses] = []
    for name, value in list(vars(python_module).items()):
        if getattr(value, "__module__", "") != python_module.__name__:
            continue  # imported
        if isinstance(value, type):
            found += [uses for method, uses in methods_of(value).items() if not method.startswith(SETUP)]
        elif (code := _code(value)) is not None and not name.startswith((*ONCE, *SETUP)):
            found.append(uses_of(code))
    return tuple(found)


def functions_around(kind: type) -> list[Uses]:
    """Returns the functions of the Python modules that define a class and its bases."""
    return [
        uses
        for base in kind.__mro__
        if base not in _BASES and base.__module__ in sys.modules and not base.__module__.startswith("torch.")
        for uses in functions_of(sys.modules[base.__module__])
    ]


@functools.cache
def uses_of(code: types.CodeType) -> Uses:
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
            inner = uses_of(constant)
            loads |= inner.loads
            stores |= inner.stores
            fills = fills or inner.fills_containers
    return Uses(frozenset(loads), frozenset(stores), fills)


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
