"""The names that a class's code loads and stores, read from its bytecode."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Iterator
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


class _Function(NamedTuple):
    """`names`: see `_names_in`. They are kept with the code, as a dictionary would hash all of it for each look."""

    code: types.CodeType
    names: frozenset[str]


def methods_of(kind: type, name: str) -> dict[str, Uses]:
    """Returns the methods of a class whose code has this name, but for those that run once."""
    return {of: uses_of(code) for of, (code, names) in _methods_of(kind).items() if name in names}


@functools.cache
def _methods_of(kind: type) -> dict[str, _Function]:
    found: dict[str, _Function] = {}
    for base in kind.__mro__:
        if base in _BASES or base.__module__ == "builtins":
            continue
        for name, value in vars(base).items():
            code = _code(value)
            if code is not None and name not in found and not name.startswith(ONCE):
                found[name] = _Function(code, _names_in(code))
    return found


@functools.cache
def loaders_of(kind: type) -> list[Uses]:
    """Returns the methods of a class that load weights, or process them afterwards."""
    found = [(name, _code(value)) for base in kind.__mro__ for name, value in list(vars(base).items())]
    return [uses_of(code) for name, code in found if code is not None and name.startswith(_LOADING)]


@functools.cache
def _functions_of(python_module: types.ModuleType) -> tuple[_Function, ...]:
    """Returns a Python module's functions, and the methods of its classes."""
    found: list[types.CodeType] = []
    for name, value in list(vars(python_module).items()):
        if getattr(value, "__module__", "") != python_module.__name__:
            continue  # imported
        functions = list(vars(value).items()) if isinstance(value, type) else [(name, value)]
        codes = [_code(function) for of, function in functions if not of.startswith((*ONCE, *SETUP))]
        found += filter(None, codes)
    return tuple(_Function(code, _names_in(code)) for code in found)


def functions_of(python_module: types.ModuleType, name: str) -> Iterator[Uses]:
    """Yields the functions of a Python module, and the methods of its classes, whose code has this name."""
    return (uses_of(code) for code, names in _functions_of(python_module) if name in names)


def functions_of_package(package: str, name: str) -> Iterator[Uses]:
    """Yields the functions of all imported Python modules of a package whose code has this name."""
    for of in [of for of in list(sys.modules) if of.startswith(package)]:
        python_module = sys.modules.get(of)
        if of.partition(".")[0] == package and python_module is not None:
            yield from functions_of(python_module, name)


def functions_around(kind: type, name: str) -> Iterator[Uses]:
    """Yields the functions of the Python modules that define a class and its bases whose code has this name."""
    for base in kind.__mro__:
        if base not in _BASES and base.__module__ in sys.modules and not base.__module__.startswith("torch."):
            yield from functions_of(sys.modules[base.__module__], name)


@functools.cache
def names_reached(uses: Uses) -> frozenset[str]:
    """Returns the names that a function loads or has as parameters, and those of the functions in its file it calls."""
    functions = _functions_by_name(uses.file)
    reached, called = uses.loads | uses.arguments, uses.loads
    for _ in range(_CALLS):
        inner = [uses_of(code) for name in called & functions.keys() for code in functions[name]]
        called = frozenset[str]().union(*(one.loads for one in inner)) - reached
        reached = reached.union(*(one.loads | one.arguments for one in inner))
    return reached


@functools.cache
def _functions_by_name(file: str) -> dict[str, list[types.CodeType]]:
    found: dict[str, list[types.CodeType]] = {}
    for python_module in [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]:
        for code, _ in _functions_of(python_module):
            found.setdefault(code.co_name, []).append(code)
    return found


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Returns all names that its `Uses` may have. They are read much faster than its instructions."""
    found = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    has_strings = not found.isdisjoint(_BY_STRING)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str) and has_strings:
            found.add(constant)
        elif isinstance(constant, tuple) and "out" in constant:  # a keyword of a call
            found.add("out")
    return frozenset(found)


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
