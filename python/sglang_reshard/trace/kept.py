"""Parameters, and parts of them, that an update leaves as they are: nothing that is sent reaches them, and the trainer
allows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from glob import escape

import torch

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NUMBERED = re.compile(r"(.*?\.\d*)(\d)(\..*)")  # up to the last digit of the first number
MAIN = "reshard_main"  # attribute of a model that wraps the engine's: the path of that one


def part_of(parameter: str, tensor: str) -> str:
    """Returns the name of the part of a parameter that a start fills from a checkpoint tensor."""
    return f"{parameter}[{tensor}]"


def parts_of(parameter: str, tensors: Sequence[str]) -> list[str]:
    """Returns the names of all parts of a parameter; its own if it is a checkpoint tensor itself, in another model."""
    if [name.split(".")[-2:] for name in tensors] == [parameter.split(".")[-2:]]:
        return [parameter]
    return [part_of(parameter, tensor) for tensor in tensors]


def parameter_of(name: str) -> str:
    """Returns the parameter that a kept part belongs to; of a whole parameter, its name."""
    return split_part(name)[0]


def split_part(name: str) -> tuple[str, str]:
    """Returns the parameter that a kept part belongs to, and the checkpoint tensor that fills the part.

    Of a whole parameter, the tensor is empty.
    """
    parameter, _, rest = name.partition("[")
    return parameter, rest.removesuffix("]")


def is_among(name: str, kept: Collection[str]) -> bool:
    """Returns whether a kept parameter, or a kept part, or the whole parameter of it, is one of `kept`."""
    return name in kept or parameter_of(name) in kept


def kept_versions(kept: Iterable[str], before: Mapping[str, str], others: str) -> dict[str, str]:
    """Returns the version of each parameter and each part that an update keeps.

    before  versions of parameters and parts before the update
    others  the version of all others

    A parameter that is kept keeps its parts of other versions, which are listed, too.
    """
    versions = {name: before.get(name, before.get(parameter_of(name), others)) for name in kept}
    return versions | {name: version for name, version in before.items() if parameter_of(name) in versions}


def patterns_of(names: Collection[str], most: int) -> list[str]:
    """Returns fnmatch patterns that match these names and, unless those would be more than `most`, no others.

    Names that differ in the last digit of their first number share one: `layers.1[5678].mlp`.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        match = _NUMBERED.fullmatch(name)
        before, digit, after = match.groups() if match else (name, "", "")
        found.setdefault((escape(before), escape(after)), []).append(digit)
    patterns = [
        before + (f"[{''.join(digits)}]" if len(digits) > 1 else digits[0]) + after
        for (before, after), digits in found.items()
    ]
    if len(patterns) > most:
        return sorted({_NUMBER.sub("*", escape(name)) for name in names})
    return patterns


def engine_name(model: torch.nn.Module, name: str) -> str:
    """Returns a parameter's name in the engine's own model, which `model` may wrap."""
    main: str = getattr(model, MAIN, "")
    return name.removeprefix(f"{main}.") if main else name
