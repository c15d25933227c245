"""The names that a class's code loads and stores, read from its bytecode."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

# Methods that run once, when a model is built and loaded.
_LOADING = ("load_", "post_load", "process_weights", "create_weights", "_load_")
ONCE = ("__init__", "__new__", "__setstate__", *_LOADING)
# Methods that somebody else calls, once. Only others of the class may count on them.
SETUP = ("init", "_init", "set_", "setup", "bind", "configure", "capture", "reserve", "prepare", "register", "reset")
GLOBAL, CELL = "global ", "cell "  # before stored names that are no attributes
_CALLS = 2  # of functions by functions, that are followed
_BASES = (object, torch.nn.Module)
_STORE_BY_STRING = {"setattr", "register_buffer", "register_parameter", "add_module", "register_module", "__dict__"}
_BY_STRING = {"getattr", "hasattr"} | _STORE_BY_STRING
_INTO_CONTAINER = {"setdefault", "append", "update", "insert", "extend", "add"}
_WRITES = re.compile(r"(?!requires_grad_|detach_|async_)[a-z]\w*[a-z\d]_|out")  # torch's methods in place, `out=`


class Uses(NamedTuple):
    """Names that a function loads and stores, with those of the functions inside it.

    stores            attributes; variables after `GLOBAL` and `CELL`
    fills_containers  it puts items into some container
    fills             attributes whose items it assigns: `self.weight[:] = x`
    arguments         names of its parameters
    file              that has its code
    """

    loads: frozenset[str]
    stores: frozenset[str]
    fills_containers: bool
    fills: frozenset[str] = frozenset()
    arguments: frozenset[str] = frozenset()
    file: str = ""

    def writes_in_place(self, names: frozenset[str] | set[str]) -> bool:
        """Returns whether it loads one of these attributes, and changes some tensor in place or that one's items."""
        return bool(names & self.fills or (names & self.loads and any(map(_WRITES.fullmatch, self.loads))))


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


@functools.cache
def _find_loaders(kind: type) -> list[Uses]:
    """Returns the methods of a class that load weights, or process them afterwards."""
    found = [(name, _code(value)) for base in kind.__mro__ for name, value in list(vars(base).items())]
    return [uses_of(code) for name, code in found if code is not None and name.startswith(_LOADING)]


loaders_of: Callable[[type], list[Uses]] = _find_loaders
methods_of: Callable[[type], dict[str, Uses]] = functools.cache(_find_methods)


@functools.cache
def _codes_of(python_module: types.ModuleType) -> tuple[types.CodeType, ...]:
    """Returns the code of a Python module's functions, and of the methods of its classes."""
    found: list[types.CodeType] = []
    for name, value in list(vars(python_module).items()):
        if getattr(value, "__module__", "") != python_module.__name__:
            continue  # imported
        functions = list(vars(value).items()) if isinstance(value, type) else [(name, value)]
        codes = [_code(function) for of, function in functions if not of.startswith((*ONCE, *SETUP))]
        found += filter(None, codes)
    return tuple(found)


@functools.cache
def functions_of(python_module: types.ModuleType) -> tuple[Uses, ...]:
    """Returns the functions of a Python module, and the methods of its classes."""
    return tuple(map(uses_of, _codes_of(python_module)))


def functions_that_mention(package: str, *names: str) -> Iterator[Uses]:
    """Yields the functions of all imported Python modules of a package whose code has all these names."""
    for name in [name for name in list(sys.modules) if name.startswith(package)]:
        python_module = sys.modules.get(name)
        if name.partition(".")[0] == package and python_module is not None:
            yield from (uses_of(code) for code in _codes_of(python_module) if _mentioned(code).issuperset(names))


@functools.cache
def names_reached(uses: Uses) -> frozenset[str]:
    """Returns the names that a function loads or has as parameters, and those of the functions in its file it calls."""
    functions = _functions_by_name(uses.file)
    reached, called = uses.loads | uses.arguments, uses.loads
    for _ in range(_CALLS):
        inner = [one for name in called & functions.keys() for one in functions[name]]
        called = frozenset[str]().union(*(one.loads for one in inner)) - reached
        reached = reached.union(*(one.loads | one.arguments for one in inner))
    return reached


@functools.cache
def _functions_by_name(file: str) -> dict[str, list[Uses]]:
    found: dict[str, list[Uses]] = {}
    for python_module in [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]:
        for code in _codes_of(python_module):
            found.setdefault(code.co_name, []).append(uses_of(code))
    return found


@functools.cache
def _mentioned(code: types.CodeType) -> frozenset[str]:
    strings = (constant for constant in code.co_consts if isinstance(constant, str))
    inner = (_mentioned(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset((*code.co_names, *code.co_freevars, *code.co_cellvars, *strings)).union(*inner)


def functions_around(kind: type) -> list[Uses]:
    """Returns the functions of the Python modules that define a class and its bases."""
    return [
        uses
        for base in kind.__mro__
        if base not in _BASES and base.__module__ in sys.modules and not base.__module__.startswith("torch.")
        for uses in functions_of(sys.modules[base.__module__])
    ]


def uses_of(code: types.CodeType) -> Uses:
    return _uses_of(code, code.co_filename)  # codes of two files may be equal


@functools.cache
def _uses_of(code: types.CodeType, file: str) -> Uses:
    loads, stores, fills, filled = set[str](), set[str](), False, set[str]()
    arguments = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    instructions = list(dis.get_instructions(code))
    strings = {constant for constant in code.co_consts if isinstance(constant, str)}
    for at, instruction in enumerate(instructions):
        name = instruction.opname
        if name.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLOSURE")):
            loads.add(str(instruction.argval))
        elif name.startswith("STORE_ATTR"):
            stores.add(str(instruction.argval))
        elif name.startswith(("STORE_DEREF", "STORE_GLOBAL")):
            stores.add((GLOBAL if name == "STORE_GLOBAL" else CELL) + str(instruction.argval))
        elif name.startswith(("STORE_SUBSCR", "STORE_SLICE")):
            fills = True
            filled |= _assigned_items(instructions, at)
        elif name == "KW_NAMES" or (name == "LOAD_CONST" and isinstance(instruction.argval, tuple)):
            loads |= {"out"} & {one for one in _keywords(code, instruction) if isinstance(one, str)}
    if by_string := loads & _BY_STRING:
        loads |= strings
        if by_string & _STORE_BY_STRING:
            stores |= strings
    fills = fills or bool(loads & _INTO_CONTAINER)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = uses_of(constant)
            loads |= inner.loads
            stores |= inner.stores
            fills = fills or inner.fills_containers
            filled |= inner.fills
            arguments |= inner.arguments
    return Uses(frozenset(loads), frozenset(stores), fills, frozenset(filled), frozenset(arguments), file)


def _assigned_items(instructions: list[dis.Instruction], at: int) -> set[str]:
    """Returns the attribute whose items the instruction at this index assigns, if that is plain."""
    open_ = 2 if instructions[at].opname == "STORE_SLICE" else 1  # values of the index that are still to be found
    while at and open_:
        at -= 1
        name, arg = instructions[at].opname, instructions[at].arg or 0
        if name in ("BUILD_SLICE", "BUILD_TUPLE"):
            open_ += arg - 1
        elif name in ("LOAD_CONST", "LOAD_FAST"):
            open_ -= 1
        else:
            return set()
    if at < 2:
        return set()
    of, container = (one.argval if one.opname == "LOAD_ATTR" else "" for one in instructions[at - 2 : at])
    return {str(of if of and container == "data" else container)} - {""}


def _keywords(code: types.CodeType, instruction: dis.Instruction) -> tuple[Any, ...]:
    """Returns the names of the keyword arguments of the next call."""
    value = instruction.argval
    if not isinstance(value, tuple):  # Python 3.11 gives their index
        value = code.co_consts[instruction.arg] if instruction.arg is not None else ()
    return value if isinstance(value, tuple) else ()


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
