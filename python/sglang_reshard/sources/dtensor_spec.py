"""Reads the fields of a DTensor's spec other than mesh and placements, and refuses a spec with unknown fields."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from sglang_reshard.errors import Unsupported

# Of DTensorSpec in torch 2.9 to 2.14. Shape, strides and dtype of `tensor_meta` are the DTensor's own.
_KNOWN = frozenset({"mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order"})


class ShardOrder(NamedTuple):
    """The order in which mesh dimensions split a tensor.

    entries            torch's `shard_order`: (tensor dimension, the mesh dimensions that split it, the first one
                       first); None if the spec has none, so that they split from left to right
    strides_are_order  split factors of `_StridedShard` state an order
    """

    entries: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    strides_are_order: bool = True


LEFT_TO_RIGHT = ShardOrder()


def shard_order(where: str, spec: Any) -> ShardOrder:
    """Returns the shard order of a DTensorSpec.

    Raises Unsupported, starting with `where` and naming it, for a field that this package does not know and whose
    value is not the one that torch gives it by default.
    """
    unknown = (_field_names(type(spec)) | vars(spec).keys()) - _KNOWN
    for name in sorted(n for n in unknown if not n.startswith("_") and not _is_default(spec, n)):
        raise Unsupported(
            f"{where} has a {type(spec).__name__} whose field {name} is {getattr(spec, name)!r}, which this version of "
            "sglang-reshard does not understand; redistribute it to plain placements, or pass what this trainer rank "
            "holds with an ExplicitSharding"
        )
    entries = getattr(spec, "shard_order", None)
    # Of torch before 2.11, whose placements alone tell.
    strides = getattr(spec, "use_strided_shard_as_shard_order", None)
    return ShardOrder(entries, strides is None or bool(strides))


def _is_default(spec: Any, name: str) -> bool:
    """Returns whether a field has the value that a spec of the same mesh and placements is given by its class."""
    try:
        return bool(getattr(type(spec)(spec.mesh, spec.placements, spec.tensor_meta), name) == getattr(spec, name))
    except Exception:  # of a class that is made in another way, nothing is known
        return False


def _field_names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
