"""What a published checkpoint has otherwise than that which transformers writes, and helpers for its tensors.

The rows are in published_dense.py, published_experts.py, published_multimodal.py and published_drafts.py. Names are
those of the checkpoint's own model card or modeling code; values are random anyway, so that joined tensors need their
shape only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Draft:
    """That an architecture is the draft of another, which SGLang is told to build with it.

    target   the architecture that config.json names
    tensors  makes the draft's own checkpoint, in a folder of its own, out of the target's; None: it is in the target's
    config   keys of the draft's own config.json, beside those of the target's
    """

    target: str
    tensors: Callable[[Weights], Weights] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """How to write a checkpoint of one architecture.

    writer   the transformers class that writes what it is made of; None: the one of the architecture's name
    instead  values for keys of that class's config, where the tiny ones do not go together
    tensors  makes the checkpoint's tensors out of that class's
    config   keys of the published config.json, beside or instead of what that class writes; parts of it are merged.
             Or what makes that out of what the class writes
    draft    of a draft model, which is built and loaded with its target
    """

    writer: str | None = None
    instead: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[Weights], Weights] = dict
    config: Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] = field(default_factory=dict)
    draft: Draft | None = None


def renamed(*rules: tuple[str, str]) -> Callable[[Weights], Weights]:
    """Regular expressions and what takes their place in a name, one after the other."""

    def rename(name: str) -> str:
        for pattern, other in rules:
            name = re.sub(pattern, other, name)
        return name

    return lambda weights: {rename(name): tensor for name, tensor in weights.items()}


def joined(whole: str, *parts: str) -> Callable[[Weights], Weights]:
    """Tensors whose names differ in one of `parts` are one tensor on disk, row after row, with `whole` in its name."""

    def join(weights: Weights) -> Weights:
        found = dict(weights)
        for name in weights:
            if parts[0] in name:
                names = [name.replace(parts[0], part) for part in parts]
                found[name.replace(parts[0], whole)] = torch.cat([found.pop(n) for n in names])
        return found

    return join


def without(pattern: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if not re.search(pattern, name)}


def biased(pattern: str) -> Callable[[Weights], Weights]:
    """Each weight whose name matches has a bias, too."""

    def add(weights: Weights) -> Weights:
        matching = [n for n in weights if re.search(pattern, n) and n.endswith(".weight")]
        return weights | {f"{n.removesuffix('weight')}bias": weights[n].new_zeros(len(weights[n])) for n in matching}

    return add


def stacked(pattern: str, whole: str) -> Callable[[Weights], Weights]:
    """Tensors of experts, with their number in the group of `pattern`, are one tensor on disk, named by `whole`."""

    def stack(weights: Weights) -> Weights:
        experts: dict[str, list[torch.Tensor]] = {}
        for name in sorted(weights, key=lambda n: [int(x) if x.isdigit() else x for x in n.split(".")]):
            if re.search(pattern, name):
                experts.setdefault(re.sub(pattern, whole, name), []).append(weights[name])
        others = {n: t for n, t in weights.items() if not re.search(pattern, n)}
        return others | {name: torch.stack(tensors) for name, tensors in experts.items()}

    return stack


def with_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Weights], Weights]:
    def add(weights: Weights) -> Weights:
        like = next(iter(weights.values()))
        return weights | {name: like.new_zeros(shape) for name, shape in shapes.items()}

    return add


def with_layers(layers: Iterable[int], shapes: Mapping[str, tuple[int, ...]]) -> Callable[[Weights], Weights]:
    """Tensors of these shapes for each of these layers, by their names in the layer; ones, which count as linear."""

    def add(weights: Weights) -> Weights:
        like = next(iter(weights.values()))
        own = {f"model.layers.{i}.{n}": like.new_ones(shape) for i in layers for n, shape in shapes.items()}
        return weights | own

    return add


def after(*steps: Callable[[Weights], Weights]) -> Callable[[Weights], Weights]:
    def all_of_them(weights: Weights) -> Weights:
        for step in steps:
            weights = step(weights)
        return weights

    return all_of_them


def merged(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys of another, in its parts, too."""
    parts = {
        k: merged(config[k], v) for k, v in other.items() if isinstance(v, dict) and isinstance(config.get(k), dict)
    }
    return {**config, **other, **parts}


def config_within(key: str, **whole: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What the class writes is the part under `key`, with what `whole` has there; the rest of that is beside it."""
    part = whole.get(key, {})

    def make(config: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "architectures": config["architectures"], key: config | part}

    return make
