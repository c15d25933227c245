"""Attaches state to SGLang's own objects: the tokenizer manager and the model runner outlive every update."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def attached(owner: object, kind: type[T]) -> T:
    """Returns the `kind` that is attached to an object of SGLang's; attaches a new one at first.

    A search for tensors that depend on weights passes by the attribute, see `derived.reachable`.
    """
    found: T = vars(owner).setdefault(f"_reshard_{kind.__name__.lower().lstrip('_')}", kind())
    return found
