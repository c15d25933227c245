"""Names of tensors: mappings to them, fnmatch patterns of them, and other names than they were passed under.

The two sides of an update may have different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.shown_names import some_names

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


Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]


def pairs(named_tensors: Any) -> Iterable[tuple[Any, ...]]:
    """Returns (name, tensor) pairs of a mapping, such as a state dict or a TensorDict, and other iterables as given.

    The names of nested TensorDicts are joined with dots, as a module's are.
    """
    if hasattr(named_tensors, "flatten_keys"):
        named_tensors = named_tensors.flatten_keys(".")
    found: Iterable[tuple[Any, ...]] = named_tensors.items() if is_mapping(named_tensors) else named_tensors
    return found


def is_mapping(named_tensors: Any) -> bool:
    """Returns True for a mapping of names to tensors. A TensorDict is one, and no `Mapping`."""
    return isinstance(named_tensors, Mapping) or hasattr(named_tensors, "flatten_keys")


def ignored_remark(names: Sequence[str]) -> str:
    """Returns a report's remark on tensors that were left out; empty if none were."""
    return f"ignored: {some_names(names)}" if names else ""


def patterns(given: Iterable[str]) -> tuple[str, ...]:
    """Returns fnmatch patterns as a tuple; a string is one pattern."""
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True, slots=True)
class Renaming:
    """Gives the trainer's tensors other names, or leaves them out. Two that are equal do the same.

    prefixes  (old, new), the longest old prefix first; the first one that a name begins with is replaced, once
    function  takes the place of `prefixes`
    ignored   fnmatch patterns of names, as they are then, of tensors to leave out
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    function: Callable[[str], str] | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, rename: Rename | Renaming | None, ignored: Sequence[str] = ()) -> Renaming | None:
        """Returns the renaming that a user gave, a dict of prefixes or a function. Raises Mismatch for others."""
        if ignored:
            return replace(cls.of(rename) or cls(), ignored=tuple(ignored))
        if rename is None or isinstance(rename, Renaming):
            return rename
        if isinstance(rename, Mapping):
            if not all(isinstance(text, str) for pair in rename.items() for text in pair):
                raise Mismatch(
                    f"rename={dict(rename)!r} is not a dict of prefixes; map strings to strings, old prefix to new "
                    "prefix"
                )
            ordered = sorted(rename.items(), key=lambda pair: (-len(pair[0]), pair[0]))
            return cls(prefixes=tuple(ordered)) if ordered else None
        if callable(rename):
            return cls(function=rename)
        raise Mismatch(f"rename is a {type(rename).__name__}; pass a dict of prefixes, or a function from name to name")

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor that has this name now is left out."""
        return matches_any(name, self.ignored)

    def __call__(self, name: str) -> str:
        """Returns the new name. Raises Mismatch if the function returns none."""
        if self.function is not None:
            new = self.function(name)
            if not isinstance(new, str) or not new:
                raise Mismatch(f"rename returned {new!r} for {name}; it must return the name to send the tensor under")
            return new
        for old, replacement in self.prefixes:
            if name.startswith(old):
                return replacement + name[len(old) :]
        return name
