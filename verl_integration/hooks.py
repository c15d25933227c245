"""Wrapping a method of verl's, once in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_sglang_reshard"


def around(
    owner: type, name: str, ours: Callable[..., Any], dressed: Callable[[Any], Any] = lambda method: method
) -> None:
    """Call `ours(stock, self, ...)` where `owner.name(self, ...)` is called; `stock` is the method as it was.

    Only a method that `owner` itself defines. A second call does nothing.

    dressed  a decorator of the result, for methods whose decorator looks at who calls them
    """
    stock = vars(owner)[name]
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(stock, self, *args, **kwargs)

    outermost = dressed(method)
    setattr(outermost, _MARK, True)
    setattr(owner, name, outermost)
