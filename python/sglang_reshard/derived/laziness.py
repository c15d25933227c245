"""Recognises state that code makes when it first needs it, by the code's own instructions.

A method that stores an attribute, and checks for it before or is called by one that does, makes it again once it is
gone: `if self._cached is None: self._cached = ...`. An attribute that is only stored, by a constructor, a loader or
another object, is not made again, unless a *guard* that the same function stores is: `if not self._ready: ...`.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from sglang_reshard.derived.loaded_state import Change
from sglang_reshard.derived.reachable import Table
from sglang_reshard.trace.code_uses import (
    CELL,
    GLOBAL,
    SETUP,
    Uses,
    functions_around,
    functions_of,
    functions_of_package,
    loaders_of,
    methods_of,
    names_reached,
    uses_of,
)

_Property = functools.cached_property
_TORCH = os.path.dirname(torch.__file__) + os.sep
_READS_VALUES = frozenset(("item", "tolist", "numpy"))  # what makes Python's numbers of tensors


def is_lazy(table: Table, key: Any) -> bool:
    """Returns whether code makes the value under `key` again, once it is gone."""
    if table.kind == "cache":
        return True
    if table.kind == "container":
        return any(u.fills_containers and name in u.loads | u.arguments for u, name in _of_keepers(table))
    if table.kind == "attributes":
        kept = (vars(base).get(key) for base in type(table.owner).__mro__)
        if any(makers(owner, key) for owner in owners(table)) or any(isinstance(k, _Property) for k in kept):
            return True
        if isinstance(table.owner, types.FunctionType):
            return any(key in uses.loads and key in uses.stores for uses in _uses(table, key))
        # A name like that is of one class, so a function anywhere that has it is of its package.
        is_private = isinstance(key, str) and key.startswith("_") and len(key) > 3
        return is_private and any(key in u.loads and key in u.stores for u in _elsewhere(table, key))
    return any(key in uses.loads and _stored(table, key) in uses.stores for uses in _uses(table, key))


def makers(owner: Any, attribute: str) -> list[str]:
    """Returns the methods of `owner` that make `attribute` when it is needed; "" for those of its helpers."""
    methods = methods_of(type(owner), attribute)
    found = [
        name
        for name, uses in methods.items()
        if attribute in uses.stores
        and (
            (attribute in uses.loads and not name.startswith(SETUP))
            or any(
                attribute in caller.loads and name in caller.loads and not of.startswith(SETUP)
                for of, caller in methods.items()
                if of != name
            )
        )
    ]
    helpers = any(attribute in uses.loads and attribute in uses.stores for uses in _helper_methods(owner, attribute))
    return found + [""] * helpers


def guards(change: Change, changes: Sequence[Change]) -> list[Change]:
    """Returns those of the changes after whose restoration code makes again what `change` is of."""
    table, key = change.table, change.key
    if table.kind not in ("attributes", "class", "globals"):
        return []
    uses = [*_uses(table, key), *(_elsewhere(table, key) if table.kind == "attributes" else ())]
    made = [u for u in uses if _stored(table, key) in u.stores or (change.how == "written" and key in u.loads)]
    return [
        other
        for other in changes
        if other.how == "appeared"
        and (other.key, id(other.table.identity)) != (key, id(table.identity))
        and any(owner is other.table.owner for owner in owners(table))
        and any(_stored(other.table, other.key) in u.stores for u in made)
        and is_lazy(other.table, other.key)
    ]


def may_read(change: Change, weights: Collection[str]) -> bool:
    """Returns whether code that stores or changes the value also loads a weight, or is not known.

    Functions outside of classes get weights as arguments of any name. Unknown code counts for state of the model only,
    and not for globals.

    weights  names of parameters, without those of their modules
    """
    makers, table = making(change), change.table
    if not makers:
        return not table.is_global
    of_class = table.kind in ("attributes", "class") and not table.is_global
    return any(
        not names_reached(uses).isdisjoint(weights) or (not of_class and uses.arguments - {"self", "cls"})
        for uses in makers
    )


def is_made_of_values(change: Change) -> bool:
    """Returns whether code that stores a number reads one from a tensor."""
    return any(not names_reached(uses).isdisjoint(_READS_VALUES) for uses in making(change))


def is_set_by_loading(change: Change) -> bool:
    """Returns whether loading sets the value, and no other known code: updates repeat loading."""
    table, key, in_container = change.table, change.key, change.table.kind == "container"
    owner, name = table.keepers[0] if in_container and table.keepers else (table.owner, key)
    kinds = [type(owner), *map(type, getattr(owner, "__dict__", {}).values())]
    sets = [u for kind in kinds for u in loaders_of(kind) if name in (u.loads if in_container else u.stores)]
    return bool(sets) and not making(change)


def making(change: Change) -> list[Uses]:
    """Returns the functions of the model that store or change a value."""
    table, key = change.table, change.key
    if table.kind == "cache":
        code = getattr(table.entries.__wrapped__, "__code__", None)
        return [uses_of(code)] if code is not None else []
    if table.kind == "container":
        return [u for u, name in _of_keepers(table) if u.fills_containers and name in u.loads | u.arguments]
    if change.how == "written":
        # torch's modules count their batches and reset their weights, and derive nothing.
        own = (u for u in _uses(table, key) if not u.file.startswith(_TORCH))
        return [u for u in own if key in u.stores or u.writes_in_place({key})]
    uses = [*_uses(table, key), *(_elsewhere(table, key) if change.how == "appeared" else ())]
    stored = _stored(table, key)
    return [u for u in uses if stored in u.stores]


def _stored(table: Table, key: Any) -> Any:
    """Returns the name of a value in `Uses.stores`."""
    prefix = {"globals": GLOBAL, "closure": CELL}.get(table.kind, "")
    return f"{prefix}{key}" if prefix else key


def owners(table: Table) -> list[Any]:
    """Returns the objects whose code may keep values in this table."""
    found = [table.owner, *(owner for owner, _ in table.keepers)]
    return [one for one in found if not isinstance(one, (torch.Tensor, types.ModuleType))]


def _uses(table: Table, key: Any) -> Iterator[Uses]:
    """Yields the functions that may make the value of a table under `key`, and others that have this name."""
    if table.kind == "closure":
        yield uses_of(table.owner.__code__)
    elif table.kind == "globals":
        yield from functions_of(table.owner, key)
    else:
        for owner in owners(table):
            yield from _methods_for(owner, key)


def _of_keepers(table: Table) -> Iterator[tuple[Uses, str]]:
    """Yields the functions that may fill a container, or call a cached function, with the name that they know it by."""
    for owner, attribute in table.keepers:
        of_module = isinstance(owner, types.ModuleType)
        for uses in functions_of(owner, attribute) if of_module else _methods_for(owner, attribute):
            yield uses, attribute


def _elsewhere(table: Table, key: Any) -> Iterator[Uses]:
    """Yields all functions of the owner's package that have this name."""
    kind = table.owner if isinstance(table.owner, type) else type(owners(table)[0]) if owners(table) else None
    for package in dict.fromkeys(base.__module__.partition(".")[0] for base in kind.__mro__) if kind else ():
        if package not in ("builtins", "torch") and isinstance(key, str):
            yield from functions_of_package(package, key)


def _methods_for(owner: Any, name: str) -> Iterator[Uses]:
    kind = owner if isinstance(owner, type) else type(owner)
    yield from methods_of(kind, name).values()
    if isinstance(owner, types.FunctionType):
        yield uses_of(owner.__code__)
    yield from _helper_methods(owner, name)


def _helper_methods(owner: Any, name: str) -> Iterator[Uses]:
    """Yields the methods of objects in attributes, such as quantization methods, and the functions around the class."""
    for helper in [] if isinstance(owner, type) else list(getattr(owner, "__dict__", {}).values()):
        if hasattr(helper, "__dict__") and not isinstance(helper, (torch.nn.Module, torch.Tensor, type)):
            yield from methods_of(type(helper), name).values()
    yield from functions_around(owner if isinstance(owner, type) else type(owner), name)
