"""Lists the tensors of a LoRA adapter that PEFT trains, on this rank, and the weights that it adapts.

sender.lora_adapter("policy", adapter_config(model)).update(adapter_tensors(model))
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources.flat import FlatBuffer, FlatMember
from sglang_reshard.sources.fsdp1 import clean_name
from sglang_reshard.sources.lora_config import check_options
from sglang_reshard.sources.lora_layers import (
    BaseWeights,
    StackedExperts,
    adapted_layers,
    check_layers,
    peft_config,
    stacked_experts,
)
from sglang_reshard.sources.module import named_shards

_OF_ADAPTER = re.compile(
    r"(?P<matrix>(?P<layer>.*)\.lora_(?P<kind>(?:embedding_)?[AB]))\.(?P<adapter>[^.]+)(?P<end>(\.weight)?)$"
)
_BASE_LAYERS = re.compile(r"(\.base_layer)+\.")
_OF_TRAINING = "lora_velora_embed"  # a buffer that only VeLoRA's backward reads
_OUTSIDE = ("lora_", "modules_to_save", "trainable_tokens")  # begin names of an adapter's parameters in other modules


def adapter_tensors(module: nn.Module, adapter: str = "default") -> list[tuple[Any, ...]]:
    """Returns an adapter's tensors under their names in PEFT's checkpoints, as `WeightSender.update` takes them.

    module   a PEFT model, or a wrapper of it
    adapter  PEFT's name of the adapter

    The adapter of stacked experts (`target_parameters`) is passed as one for each expert.

    Raises Mismatch for a module without this adapter, and Unsupported as `named_shards` and `adapter_config` do, for
    experts that SGLang does not serve adapters of, for parameters of the adapter other than lora_A and lora_B, and
    while this adapter is merged, disabled, scaled or combined with others in the model.
    """
    stacked, rows = stacked_experts(module), list(named_shards(module))
    found = [_split(row, stacked) for row in _renamed(rows, adapter)]
    if not found:
        raise Mismatch(
            f"the module has no LoRA adapter {adapter!r}; pass PEFT's model and the name of one of its adapters"
        )
    if (config := peft_config(module, adapter)) is not None:
        check_options(config.to_dict())
    check_layers(module, adapter)
    names = ([member.name for member in row[2].members] if len(row) > 2 else [row[0]] for row in rows)
    layers = _layers([name for of_row in names for name in of_row], adapter)
    if left := sorted({path for path, _ in adapted_layers(module, adapter)} - {clean_name(path) for path in layers}):
        raise Unsupported(_tied(left[0]))
    return found


def _layers(names: Sequence[str], adapter: str) -> dict[str, set[str]]:
    """Returns the layers that have the adapter, with its matrices.

    Raises Unsupported for another parameter of the adapter, and for a layer with one matrix only.
    """
    matches = {name: _OF_ADAPTER.fullmatch(name) for name in names}
    adapters, layers = set[str](), dict[str, set[str]]()
    for match in filter(None, matches.values()):
        adapters.add(match["adapter"])
        if match["adapter"] == adapter:
            layers.setdefault(match["layer"], set()).add(match["kind"])
    for name in (name for name, match in matches.items() if match is None):
        if _is_of(name, adapter, layers, adapters - {adapter}):
            raise Unsupported(
                f"{name} is a parameter of the adapter {adapter}, and SGLang serves lora_A and lora_B only; train "
                "without it, or merge the adapter into the weights"
            )
    for layer, matrices in layers.items():
        if len(matrices) % 2:
            raise Unsupported(_tied(layer))
    return layers


def _is_of(name: str, adapter: str, layers: Mapping[str, Any], others: set[str]) -> bool:
    """Returns whether a tensor that is no lora_A and no lora_B belongs to the adapter.

    layers  that have the adapter
    others  the other adapters
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        owner = parts[place + 1] if place + 1 < len(parts) else ""
        in_layer = part != "base_layer" and ".".join(parts[:place]) in layers
        if part != _OF_TRAINING and (in_layer or part.startswith(_OUTSIDE)):
            return owner == adapter or (in_layer and owner not in others)
    return False


def _tied(layer: str) -> str:
    return (
        f"{layer}: the module does not list both its lora_A and its lora_B; it lists tied parameters once. SGLang "
        "serves no tied adapters: train without tying them, or merge the adapter into the weights"
    )


def base_tensors(module: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the weights that are adapted, under their names in the model's own checkpoint. Merges nothing.

    Adapters that are merged into the weights are in them. An engine that serves adapters refuses the result while some
    are, because requests would get one twice.

    Raises Unsupported as `named_shards` does.
    """
    return BaseWeights(_renamed(named_shards(module), None), module)


def _renamed(rows: Iterable[tuple[Any, ...]], adapter: str | None) -> Iterator[tuple[Any, ...]]:
    for name, tensor, *rest in rows:
        if not rest:
            if checkpoint_name := _checkpoint_name(name, adapter):
                yield checkpoint_name, tensor
        elif (meant := _members_of(rest[0], adapter)).members:
            yield name, tensor, meant


def _split(row: tuple[Any, ...], stacked: Mapping[str, StackedExperts]) -> tuple[Any, ...]:
    """Returns an adapter's tensor as it is, or that of stacked experts as a fused tensor."""
    name, tensor, *rest = row
    if rest:
        (buffer,) = rest
        if flat := next((m.name for m in buffer.members if m.name.rpartition(".lora_")[0] in stacked), ""):
            raise Unsupported(
                f"{flat} is of stacked experts in a flat parameter of FSDP1, whose pieces are not rows of an expert's "
                "matrices; shard the model with FSDP2 (fully_shard)"
            )
        return row
    owner, _, matrix = name.rpartition(".lora_")
    if owner not in stacked:
        return row
    fused, slices = stacked[owner].split(matrix[0], tensor)
    return name, fused, slices


@functools.lru_cache(maxsize=4096)  # the same object means no change
def _members_of(buffer: FlatBuffer, adapter: str | None) -> FlatBuffer:
    named = ((_checkpoint_name(member.name, adapter), member) for member in buffer.members)
    members = (FlatMember(name, member.shape, member.begin) for name, member in named if name)
    return FlatBuffer(tuple(members), buffer.ranges)


def _checkpoint_name(name: str, adapter: str | None) -> str:
    """Returns a tensor's name in the adapter's checkpoint, or for None in the model's; empty if it is not there."""
    match = _OF_ADAPTER.fullmatch(name)
    if adapter is None:
        return "" if match else _BASE_LAYERS.sub(".", name.removeprefix("base_model.model."))
    return f"{match['matrix']}{match['end']}" if match and match["adapter"] == adapter else ""
