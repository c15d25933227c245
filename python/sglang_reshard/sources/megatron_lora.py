"""Lists the tensors of a LoRA adapter that Megatron-Bridge trains, on this rank, and describes the adapter to SGLang.

    policy = sender.lora_adapter("policy", megatron_adapter_config(models))
    policy.update(megatron_adapter_tensors(models), partial=True)

Megatron-Bridge gives a parallel linear layer an adapter of two more. Both are sharded with tensor parallelism:

    linear_in     lora_A. By rows (the adapter's rank) under linear_qkv and linear_fc1; by columns under linear_proj and
                  linear_fc2, whose inputs are sharded
    linear_out    lora_B. By rows, in the order of the adapted layer's rows: linear_qkv has the queries, key and value
                  of one group after the other, linear_fc1 each rank's part of the gate, then of the up projection

`LoRA` trains one adapter for a fused layer. PEFT has one for each of its projections: they share lora_A, and each has
its rows of lora_B. `CanonicalLoRA` trains one for each projection. Nothing is copied, and nothing is gathered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.sources.lora_config import adapter_config

_PARAMETER = re.compile(
    r"decoder\.layers\.(?P<layer>\d+)\."
    r"(?P<linear>self_attention\.linear_qkv|self_attention\.linear_proj|mlp\.linear_fc1|mlp\.linear_fc2)"
    r"\.adapter\.(adapter_(?P<one>q|k|v|gate|up)\.)?(?P<matrix>linear_in|linear_out)\.weight"
)
_OF_ADAPTER = re.compile(r"\.adapter\.|\.linear_(in|out)\.")
_PROJECTIONS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
Listed = tuple[str, torch.Tensor, ExplicitSharding]
# A projection, and first and number of the rows of its lora_B that follow those of the last `_Rows` in linear_out.
_Rows = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Part:
    """An adapter's linear_in and linear_out under Megatron-Bridge's name of the adapter."""

    name: str
    layer: int  # number of the decoder layer in the whole model
    linear: str
    projections: tuple[str, ...]  # that it adapts
    module: Any
    tp_rank: int  # in its tensor parallel group
    tp_size: int


def megatron_adapter_tensors(models: nn.Module | Sequence[nn.Module], trainer_rank: int | None = None) -> list[Listed]:
    """Returns this rank's shards of an adapter under PEFT's names, for `WeightSender.update` with `partial=True`.

    models        this rank's model, or its model chunks, as Megatron-Bridge returns them
    trainer_rank  this rank's number among the sender's trainer ranks; by default that in torch's default group

    Raises Unsupported, naming the parameter, for adapters of other layers than linear_qkv, linear_proj, linear_fc1 and
    linear_fc2 of dense decoder layers, for DoRA, and for adapters that are disabled or have an activation. Raises
    Mismatch for a model without an adapter.
    """
    rank = dist.get_rank() if trainer_rank is None else trainer_rank
    return [listed for part in _parts(models) for listed in _tensors_of(part, rank)]


def megatron_adapter_config(models: nn.Module | Sequence[nn.Module]) -> str:
    """Returns what SGLang has to know of the adapter, in JSON. Pipeline stages must adapt the same modules.

    models  as `megatron_adapter_tensors` takes them

    Raises Unsupported if ranks or alphas differ between modules, and as `megatron_adapter_tensors` does.
    """
    parts = _parts(models)
    first = parts[0]
    for part in parts:
        if (part.module.dim, part.module.alpha) != (first.module.dim, first.module.alpha):
            raise Unsupported(
                f"{part.name} has dim={part.module.dim} and alpha={part.module.alpha}, but {first.name} "
                f"dim={first.module.dim} and alpha={first.module.alpha}: an adapter of SGLang has one of each. Train "
                "with the same for all modules (normalize_moe_lora=False), or merge the adapter into the weights"
            )
    modules = {projection.rpartition(".")[2] for part in parts for projection in part.projections}
    return adapter_config({"r": first.module.dim, "lora_alpha": first.module.alpha, "target_modules": modules})


def _parts(models: nn.Module | Sequence[nn.Module]) -> list[_Part]:
    chunks = [models] if isinstance(models, nn.Module) else list(models)
    if found := [part for chunk in chunks for part in _parts_of(chunk)]:
        return found
    raise Mismatch(
        "the model has no adapter; pass the model chunks of this rank after Megatron-Bridge's LoRA has been applied to "
        "them"
    )


def _parts_of(model: nn.Module) -> Iterator[_Part]:
    while isinstance(inner := getattr(model, "module", None), nn.Module):  # DDP and Float16Module
        model = inner
    for name, parameter in model.named_parameters():
        if not _OF_ADAPTER.search(name):
            continue
        match = _PARAMETER.fullmatch(name)
        if match is None:
            if name.endswith("weight_magnitude"):
                why = "SGLang does not serve DoRA; train with LoRA"
            else:
                why = (
                    "only adapters of linear_qkv, linear_proj, linear_fc1 and linear_fc2 of dense decoder layers are "
                    "supported; leave this module out of target_modules"
                )
            raise Unsupported(f"{name}: {why}, or merge the adapter into the weights")
        if isinstance(parameter, DTensor):
            raise Unsupported(
                f"{name} is a DTensor; Megatron-FSDP's adapters are not supported. Train without it, or merge the "
                "adapter into the weights"
            )
        if match["matrix"] == "linear_out":
            yield _part(model, name.removesuffix(".linear_out.weight"), match)


def _part(model: nn.Module, name: str, match: re.Match[str]) -> _Part:
    module: Any = model.get_submodule(name)
    layer: Any = model.get_submodule(f"decoder.layers.{match['layer']}")
    group = getattr(module.linear_out, "tp_group", None)
    if group is None:
        raise Unsupported(
            f"{name}: its linear_out has no tp_group, so its tensor parallel rank is not known; use Megatron-Core 0.16"
        )
    if not isinstance(getattr(module, "activation", nn.Identity()), nn.Identity):
        raise Unsupported(
            f"{name} has a {type(module.activation).__name__} between linear_in and linear_out, which SGLang does not "
            "serve; train with LoRA, or merge the adapter into the weights"
        )
    if not getattr(model.get_submodule(name[: name.index(".adapter")]), "_adapter_enabled", True):
        raise Unsupported(f"{name} is disabled; call enable_adapter_layers() before you send it")
    projections = _PROJECTIONS[match["linear"]]
    if match["one"]:
        projections = tuple(p for p in projections if p.endswith(f".{match['one']}_proj"))
    if match["linear"] == "mlp.linear_fc1" and not module.config.gated_linear_unit:
        raise Unsupported(
            f"{name}: the adapted MLP has no gate, and models differ in the name of its first projection; leave "
            "linear_fc1 out of target_modules, or merge the adapter into the weights"
        )
    return _Part(name, layer.layer_number - 1, match["linear"], projections, module, group.rank(), group.size())


def _tensors_of(part: _Part, trainer_rank: int) -> Iterator[Listed]:
    linear_in, linear_out = part.module.linear_in.weight, part.module.linear_out.weight
    prefix = f"base_model.model.model.layers.{part.layer}."
    by_columns = len(part.projections) == 1 and part.linear.endswith(("linear_proj", "linear_fc2"))
    sharding_a = _lora_a(tuple(linear_in.shape), by_columns, part.tp_rank, part.tp_size, trainer_rank)
    rank = sharding_a.shape[0]
    if rank != part.module.dim:
        raise Mismatch(
            f"{part.name}: {part.tp_size} tensor parallel ranks hold {rank} rows of linear_in, but the adapter has "
            f"dim={part.module.dim}; its tensor parallel group is not that of linear_in"
        )
    rows = _rows(part, linear_out.shape[0] * part.tp_size)
    shardings_b = dict(_lora_b(rows, tuple(linear_out.shape), part.tp_rank, trainer_rank))
    for projection in part.projections:
        yield f"{prefix}{projection}.lora_A.weight", linear_in, sharding_a
        if projection in shardings_b:
            yield f"{prefix}{projection}.lora_B.weight", linear_out, shardings_b[projection]


def _rows(part: _Part, total: int) -> tuple[_Rows, ...]:
    """Returns what the `total` rows are of all tensor parallel ranks' linear_out, one rank's after the other's."""
    if len(part.projections) == 1:
        return ((part.projections[0], 0, total),)
    if part.linear == "mlp.linear_fc1":
        own = total // 2 // part.tp_size
        return tuple((half, rank * own, own) for rank in range(part.tp_size) for half in part.projections)
    config = part.module.config
    heads, head = config.num_attention_heads, config.kv_channels
    groups = config.num_query_groups or heads
    rows = (heads // groups * head, head, head)
    if sum(rows) * groups != total:
        raise Unsupported(
            f"{part.name}: linear_out has {total} rows, but {heads} heads and {groups} groups of {head} have "
            f"{sum(rows) * groups}: linear_qkv contains more than queries, keys and values. Leave it out of "
            "target_modules, or merge the adapter into the weights"
        )
    of_group = tuple(zip(part.projections, rows, strict=True))
    return tuple((name, group * count, count) for group in range(groups) for name, count in of_group)


# Cached, as the same objects tell an update that nothing has changed.
@functools.lru_cache(maxsize=1024)
def _lora_a(
    local: tuple[int, ...], by_columns: bool, tp_rank: int, tp_size: int, trainer_rank: int
) -> ExplicitSharding:
    rows, columns = local
    start = (0, tp_rank * columns) if by_columns else (tp_rank * rows, 0)
    shape = (rows, tp_size * columns) if by_columns else (tp_size * rows, columns)
    box = Box(start, (start[0] + rows, start[1] + columns))
    return ExplicitSharding(shape, ShardMap.of([(box, (0, 0), trainer_rank)]))


@functools.lru_cache(maxsize=1024)
def _lora_b(
    rows: tuple[_Rows, ...], local: tuple[int, ...], tp_rank: int, trainer_rank: int
) -> tuple[tuple[str, ExplicitSharding], ...]:
    """Returns the sharding of each projection's lora_B that has rows in this rank's linear_out."""
    own, columns = local
    sizes: dict[str, int] = {}
    held: dict[str, list[tuple[Box, tuple[int, ...], int]]] = {}
    begin = -tp_rank * own  # of these rows in this rank's linear_out
    for projection, start, count in rows:
        sizes[projection] = sizes.get(projection, 0) + count
        first, last = max(begin, 0), min(begin + count, own)
        if first < last:
            box = Box((start + first - begin, 0), (start + last - begin, columns))
            held.setdefault(projection, []).append((box, (first, 0), trainer_rank))
        begin += count
    return tuple((name, ExplicitSharding((sizes[name], columns), ShardMap.of(found))) for name, found in held.items())
