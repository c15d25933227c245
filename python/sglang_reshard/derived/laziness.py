"""Recognises state that code makes when it first needs it, by the code's own instructions.

A method that stores an attribute, and checks for it before or is called by one that does, makes it again once it is
gone: `if self._cached is None: self._cached = ...`. An attribute that is only stored, by a constructor, a loader or
another object, is not made again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.derived.reachable import Table
from sglang_reshard.trace.code_uses import SETUP, Uses, functions_around, functions_of, methods_of, uses_of


def is_lazy(table: Table, key: Any) -> bool:
    """Returns whether code makes the value under `key` again, once it is gone."""
    if table.kind == "closure":
        uses = uses_of(table.owner.__code__)
        return key in uses.loads and key in uses.stores
    if table.kind == "globals":
        return any(key in uses.loads and key in uses.stores for uses in functions_of(table.owner))
    if table.kind == "cache":
        return True
    if table.kind == "container":
        if table.keeper is None:
            return False
        owner, attribute = table.keeper
        functions = functions_of(owner) if isinstance(owner, types.ModuleType) else _methods_for(owner)
        return any(attribute in uses.loads and uses.fills_containers for uses in functions)
    return bool(makers(table.owner, key)) or _is_cached_property(type(table.owner), key)


def makers(owner: Any, attribute: str) -> list[str]:
    """Returns the methods of `owner` that make `attribute` when it is needed; "" for those of its helpers."""
    methods = methods_of(type(owner))
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
    helpers = any(attribute in uses.loads and attribute in uses.stores for uses in _helper_methods(owner))
    return found + [""] * helpers


def _methods_for(owner: Any) -> Iterator[Uses]:
    yield from methods_of(type(owner)).values()
    yield from _helper_methods(owner)


def _helper_methods(owner: Any) -> Iterator[Uses]:
    """Yields the methods of objects in attributes, such as quantization methods, and the functions around the class."""
    for helper in list(getattr(owner, "__dict__", {}).values()):
        if hasattr(helper, "__dict__") and not isinstance(helper, (torch.nn.Module, torch.Tensor, type)):
            yield from methods_of(type(helper)).values()
    yield from functions_around(type(owner))


def _is_cached_property(kind: type, key: Any) -> bool:
    return any(isinstance(vars(base).get(key), functools.cached_property) for base in kind.__mro__)
