"""The aten operators that the recorder distinguishes: views, writes, fills, and those that only move elements."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

COPY = aten.copy_.default
FILLS = (aten.fill_.Scalar, aten.zero_.default)
FILL_TENSOR = aten.fill_.Tensor
ITEMS = (aten._local_scalar_dense.default, aten.item.default)
CAST = aten._to_copy.default
CLONE = aten.clone.default
CAT = aten.cat.default
STACK = aten.stack.default
PAD = aten.constant_pad_nd.default
# Factories shaped after a lazy tensor, and the value that they fill in.
FACTORIES = {
    aten.empty_like.default: None,
    aten.new_empty.default: None,
    aten.new_empty_strided.default: None,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}


@cache
def is_view(func: Any) -> bool:
    """Returns True if the result aliases an argument. (That of _unsafe_view does, though its schema hides it.)"""
    return func is aten._unsafe_view.default or any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


@cache
def _written_parameters(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    parameters = _written_parameters(func)
    if not parameters:
        return []
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in parameters]


@cache
def out_of_place(func: Any) -> Any:
    """Returns the operator that computes what an in-place one (`mul_`) would leave behind; None if there is none."""
    namespace, name = func._schema.name.split("::")
    if namespace != "aten" or not name.endswith("_") or len(_written_parameters(func)) != 1:
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, func._overloadname, None)


def map_leaves(function: Any, value: Any) -> Any:
    """Returns the arguments of an operator with `function` applied to every leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, v) for v in value])
    if kind is dict:
        return {k: map_leaves(function, v) for k, v in value.items()}
    return function(value)
