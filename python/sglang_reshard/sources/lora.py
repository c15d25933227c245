"""Lists the tensors of a LoRA adapter that PEFT trains, on this rank, and describes the adapter to SGLang.

sender.lora_adapter("policy", adapter_config(model)).update(adapter_tensors(model))
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources.flat import FlatBuffer, FlatMember
from sglang_reshard.sources.lora_experts import StackedExperts, stacked_experts, target_modules
from sglang_reshard.sources.module import named_shards

_OF_ADAPTER = re.compile(r"(?P<matrix>.*\.lora_(?:embedding_)?[AB])\.(?P<adapter>[^.]+)(?P<end>(\.weight)?)$")
_BASE_LAYERS = re.compile(r"(\.base_layer)+\.")
# Of PEFT's configuration: what SGLang does not compute, and would serve as if it were not there.
_NOT_SERVED = {
    "use_dora": "DoRA's magnitudes",
    "lora_bias": "biases",
    "rank_pattern": "ranks that differ between modules",
    "alpha_pattern": "scalings that differ between modules",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "trained tokens",
    "alora_invocation_tokens": "adapters that invocation tokens activate",
    "arrow_config": "routed adapters",
    "monteclora_config": "sampled adapters",
    "use_qalora": "QA-LoRA's groups",
}


def adapter_tensors(module: nn.Module, adapter: str = "default") -> list[tuple[Any, ...]]:
    """Returns an adapter's tensors under their names in PEFT's checkpoints, as `WeightSender.update` takes them.

    module   a PEFT model, or a wrapper of it
    adapter  PEFT's name of the adapter

    The adapter of stacked experts (`target_parameters`) is passed as one for each expert.

    Raises Mismatch for a module without this adapter, and Unsupported as `named_shards` does, and for experts that
    SGLang does not serve adapters of.
    """
    stacked = stacked_experts(module)
    found = [_split(row, stacked) for row in _renamed(module, adapter)]
    if not found:
        raise Mismatch(
            f"the module has no LoRA adapter {adapter!r}; pass PEFT's model and the name of one of its adapters"
        )
    return found


def base_tensors(module: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the weights that are adapted, under their names in the model's own checkpoint. Merges nothing.

    Raises Unsupported as `named_shards` does.
    """
    return list(_renamed(module, None))


def _renamed(module: nn.Module, adapter: str | None) -> Iterator[tuple[Any, ...]]:
    for name, tensor, *rest in named_shards(module):
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


def adapter_config(config: Any, adapter: str = "default") -> str:
    """Returns what SGLang has to know of an adapter, in JSON.

    SGLang scales every adapter by lora_alpha / r. For rsLoRA the result has the lora_alpha that makes this PEFT's
    scaling.

    config   a PEFT model, its `peft_config[adapter]`, or that as a mapping

    Raises Unsupported, naming the option, for an adapter that SGLang would not compute as PEFT does.
    """
    given = getattr(config, "peft_config", config)
    if isinstance(given, Mapping) and adapter in given:
        given = given[adapter]
    options = dict(given if isinstance(given, Mapping) else given.to_dict())
    if missing := sorted({"r", "lora_alpha", "target_modules"} - options.keys()):
        raise Mismatch(f"the adapter's configuration lacks {', '.join(missing)}; pass model.peft_config['default']")
    kind = str(getattr(options.get("peft_type"), "value", options.get("peft_type", "LORA")))
    if kind != "LORA":
        raise Unsupported(
            f"peft_type={kind}: SGLang serves only LoRA adapters; merge this adapter into the weights instead"
        )
    for option, what in _NOT_SERVED.items():
        if options.get(option):
            raise Unsupported(
                f"{option}={options[option]}: SGLang does not serve {what}; train without it, or merge the adapter "
                "into the weights and update the weights"
            )
    if (bias := options.get("bias", "none")) != "none":
        raise Unsupported(f"bias={bias!r}: SGLang does not serve biases of an adapter; train with bias='none'")
    of_experts = target_modules(options.get("target_parameters") or ())
    modules = options["target_modules"] or ()
    if isinstance(modules, str) and modules not in ("all", "all-linear"):
        raise Unsupported(
            f"target_modules={modules!r} is a pattern, and SGLang does not serve patterns; list the modules"
        )
    rank, alpha = int(options["r"]), options["lora_alpha"]
    if options.get("use_rslora"):
        alpha *= math.sqrt(rank)  # SGLang scales by lora_alpha / r, and rsLoRA by lora_alpha / sqrt(r)
    return json.dumps(
        {
            "peft_type": kind,
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": modules if isinstance(modules, str) else sorted({*modules, *of_experts}),
        }
    )
