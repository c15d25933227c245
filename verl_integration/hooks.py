"""Wraps methods of verl's classes and functions of its modules, once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MARK = "_sglang_reshard"


def around(
    owner: type | ModuleType,
    name: str,
    hook: Callable[..., Any],
    decorator: Callable[[Any], Any] = lambda method: method,
) -> None:
    """Makes `owner.name(self, ...)` call `hook(stock, self, ...)`, where `stock` is the original method or function.

    Only for methods that a class itself defines, and functions that are in a module. A second call does nothing.

    decorator  applied to the result, for methods whose decorator inspects the caller
    """
    stock = vars(owner)[name]
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(stock, self, *args, **kwargs)

    outermost = decorator(method)
    setattr(outermost, _MARK, True)
    setattr(owner, name, outermost)
