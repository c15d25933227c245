"""Converts experts that a checkpoint stacks in one tensor, and Megatron-Core keeps as a parameter each.

Megatron-Bridge converts one expert after the other, keeps the results, and stacks them when it has all. Here all
experts of a layer go through its code, and only one of them is followed: the elements of the others are placeholders.
So the bridge alone decides on the order of experts, on transposition and on how gate and up are joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from sglang_reshard.errors import Unsupported

# An architecture bridge's function that modifies the converted tensors of a task; empty while experts are missing.
Finish: TypeAlias = Callable[[Any, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
_EXPERT_NUMBER = re.compile(r"\bexperts\.\d")


class ExpertStack:
    """The experts of a layer on this rank, as tasks of the bridge, that a checkpoint stacks in the same tensors."""

    def __init__(self, bridge: Any, shapes: CheckpointShapes) -> None:
        self._bridge, self._shapes = bridge, shapes
        self.experts: list[Any] = []
        self._placeholders: Mapping[str, torch.Tensor] | None = None

    def converter(self, task: Any) -> Callable[[torch.Tensor], Mapping[str, torch.Tensor]]:
        """Returns the converter of one expert to the tensors that all experts of its layer are in."""

        def convert(shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
            if self._placeholders is None:  # converted once: each expert is followed among all the others
                self._placeholders = _converted(self.experts[0], _placeholder(shard))
            finish, tensors = finish_of(self._bridge, self._shapes), dict[str, torch.Tensor]()
            for expert in self.experts:
                tensors |= finish(expert, _converted(expert, shard) if expert is task else self._placeholders)
            if not tensors:
                raise Unsupported("the bridge fuses it with parameters that are no experts of its layer")
            return tensors

        return convert


def stacked_experts(bridge: Any, shapes: CheckpointShapes, tasks: Sequence[Any]) -> dict[int, ExpertStack]:
    """Returns, by id, the stack of each of this rank's tasks whose expert a checkpoint stacks with others."""
    stacks: dict[tuple[str, ...], ExpertStack] = {}
    found = {}
    for task in tasks:
        if not getattr(task.mapping, "is_expert", False):
            continue
        names = checkpoint_names(task.mapping)
        if not any(map(_EXPERT_NUMBER.search, names)):
            found[id(task)] = stacks.setdefault(names, ExpertStack(bridge, shapes))
            found[id(task)].experts.append(task)
    return found


def finish_of(bridge: Any, shapes: CheckpointShapes) -> Finish:
    """Returns what the bridge does with the converted tensors of each task of one export."""
    model_bridge: Any = getattr(bridge, "_model_bridge", None)  # another object each time
    modify = getattr(model_bridge, "maybe_modify_converted_hf_weight", None)
    if model_bridge is not None:
        pretrained = bridge.hf_pretrained
        model_bridge.hf_config = getattr(pretrained, "config", pretrained)  # as its export does before
    kept: dict[str, dict[int, torch.Tensor]] = {}

    def finish(task: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if getattr(task.mapping, "is_grouped_export", False):  # newer bridges, in place of the function above
            config = task.mapping._get_config(task.megatron_module)
            return model_bridge._accumulate_grouped_export(task, tensors, config, kept, shapes) or {}
        return tensors if modify is None else modify(task, tensors, shapes.checkpoint)

    return finish


class CheckpointShapes(Mapping[str, torch.Tensor]):
    """The tensors of a bridge's checkpoint, without data: a bridge only compares their shapes.

    checkpoint  the bridge's own, which would read a whole tensor from the disk
    """

    def __init__(self, bridge: Any) -> None:
        self.checkpoint: Any = getattr(getattr(bridge, "hf_pretrained", None), "state", {})
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            self._shapes[name] = self._read(name)
        return torch.empty(self._shapes[name], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint)

    def __len__(self) -> int:
        return len(self.checkpoint)

    def _read(self, name: str) -> tuple[int, ...]:
        source = getattr(self.checkpoint, "source", None)
        file = getattr(source, "key_to_filename_map", {}).get(name)
        if file is None:
            return tuple(self.checkpoint[name].shape)
        from safetensors import safe_open

        with safe_open(Path(source.path, file), "pt") as tensors:  # type: ignore[union-attr]
            return tuple(tensors.get_slice(name).get_shape())


def checkpoint_names(mapping: Any) -> tuple[str, ...]:
    """Returns the checkpoint tensors that the bridge lists for a mapping."""
    names = mapping.hf_param
    return tuple(names.values()) if isinstance(names, Mapping) else (str(names),)


def _placeholder(like: torch.Tensor) -> torch.Tensor:
    return torch.full(tuple(like.shape), float("nan"), dtype=like.dtype, device=like.device)


def _converted(task: Any, shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Converts by verl's probe, which has no communication, with as many expert parallel ranks as there are."""
    from verl.workers.engine.megatron.delta_export import make_probe

    probe = make_probe(task.mapping, task.megatron_module)
    _gather_experts(probe)
    found: Mapping[str, torch.Tensor] = probe.megatron_to_hf(shard, task.megatron_module)
    return found


def _gather_experts(mapping: Any) -> None:
    """The ranks' experts of one place have one name. Megatron-Bridge then stacks them, and verl's probe does not."""
    for value in vars(mapping).values():
        if hasattr(type(value), "gather_from_ep_ranks"):
            _gather_experts(value)
    size, rank = mapping.ep_size, mapping.ep_rank
    if size > 1:

        def gather(shard: torch.Tensor, module: Any, name: Any) -> dict[str, torch.Tensor]:
            of_ranks = [_placeholder(shard)] * size
            of_ranks[rank] = shard
            return {str(name): torch.stack(of_ranks)}

        mapping.gather_from_ep_ranks = gather
