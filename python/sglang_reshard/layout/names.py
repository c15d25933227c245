"""Gives the tensors of a layout other names, as the two sides of an update may have different ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.source_layout import SourceLayout

_HELD_BACK = "(not for the loader) "
_EMBEDDINGS = ("wte", "shared")  # modules, and those with "embed" in their names


def renamed(layout: SourceLayout, names: Sequence[str]) -> SourceLayout:
    """Returns the layout with `names`, in its order. Raises Mismatch unless there is one for each tensor."""
    if len(names) != len(layout.tensors):
        raise Mismatch(
            f"the engine sent {len(names)} names for the {len(layout.tensors)} tensors of the source layout; trainer "
            "and engine must run the same version of sglang-reshard"
        )
    tensors = (msgspec.structs.replace(t, name=name) for t, name in zip(layout.tensors, names, strict=True))
    return msgspec.structs.replace(layout, tensors=tuple(tensors))


def held_back(name: str) -> str:
    """Returns the name of a tensor that is kept from the engine's loader."""
    return f"{_HELD_BACK}{name}"


def is_held_back(name: str) -> bool:
    return name.startswith(_HELD_BACK)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether one of these fnmatch patterns matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_embedding(name: str) -> bool:
    """Returns whether a tensor is of a module that models call an embedding."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return "embed" in module or module in _EMBEDDINGS
