"""As much of Megatron-Bridge as verl asks of it, so that verl's own export code can run without it.

Written from how Megatron-Core lays out its parameters, not from Megatron-Bridge: the converters here join the tensor
parallel shards and sort their rows, as its do, under the names of attributes and methods that verl reads or replaces.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_pg_rank, get_pg_size

MODULE = "megatron.bridge.models.conversion.param_mapping"


def install() -> None:
    """Let verl's lazy `from megatron.bridge.models.conversion.param_mapping import ...` find this file."""
    parts = MODULE.split(".")
    for end in range(2, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[MODULE].MegatronParamMapping = MegatronParamMapping


class MegatronParamMapping:
    """Converts one Megatron parameter to checkpoint tensors."""

    is_grouped_export = False

    def __init__(self, megatron_param: str, hf_param: Any) -> None:
        self.megatron_param, self.hf_param = megatron_param, hf_param
        self.pp_group = mpu.get_pipeline_model_parallel_group()
        self.ep_group = mpu.get_expert_model_parallel_group()
        self._tp_group = mpu.get_tensor_model_parallel_group()
        self._etp_group = mpu.get_expert_tensor_parallel_group()

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.megatron_param

    @property
    def tp_size(self) -> int:
        return get_pg_size(self._etp_group if self.is_expert else self._tp_group)

    @property
    def tp_rank(self) -> int:
        return get_pg_rank(self._etp_group if self.is_expert else self._tp_group)

    def gather_from_tp_ranks(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("a probe must not gather")

    def gather_from_ep_ranks(self, tensor: torch.Tensor, module: Any, name: str) -> dict[str, torch.Tensor]:
        raise AssertionError("a probe must not gather")

    def gathered(self, name: str, tensor: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        return self.gather_from_ep_ranks(tensor, module, name) if self.is_expert else {name: tensor}

    def megatron_to_hf(self, weights: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError


class Joined(MegatronParamMapping):
    """Shards joined along `dim`; None: every rank has it whole."""

    dim: int | None = None

    def megatron_to_hf(self, weights: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        if self.dim is not None and self.tp_size > 1 and weights.dim() > self.dim:
            weights = torch.cat(self.gather_from_tp_ranks(weights), dim=self.dim)
        return self.gathered(self.hf_param, weights, module)


class Rows(Joined):
    dim = 0


class Columns(Joined):
    dim = 1


class Auto(MegatronParamMapping):
    """Finds out how its module is split when it first sees it."""

    _mapping: Joined | None = None

    def _detect_parallelism_type(self, module: Any) -> str:
        return {"ColumnParallelLinear": "column", "VocabParallelEmbedding": "column", "RowParallelLinear": "row"}.get(
            type(module).__name__, "replicated"
        )

    def _get_or_create_mapping(self, kind: str) -> Joined:
        return {"column": Rows, "row": Columns, "replicated": Joined}[kind](self.megatron_param, self.hf_param)

    def megatron_to_hf(self, weights: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        if self._mapping is None:
            self._mapping = self._get_or_create_mapping(self._detect_parallelism_type(module))
        return self._mapping.megatron_to_hf(weights, module)


class QueryKeyValue(MegatronParamMapping):
    """Rows of a group of heads come together: its queries, its key, its value."""

    def __init__(self, megatron_param: str, names: dict[str, str]) -> None:
        super().__init__(megatron_param, names)
        self._tp_mapping = Auto(megatron_param, megatron_param)

    def megatron_to_hf(self, weights: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        (packed,) = self._tp_mapping.megatron_to_hf(weights, module).values()
        config = module.config
        groups, width = config.num_query_groups, config.kv_channels
        queries = config.num_attention_heads // groups
        heads = packed.view(groups * (queries + 2), width, *packed.shape[1:])
        first = torch.arange(groups) * (queries + 2)
        picked = {
            "q": (first[:, None] + torch.arange(queries)).flatten(),
            "k": first + queries,
            "v": first + queries + 1,
        }
        return {self.hf_param[part]: heads[rows].reshape(-1, *packed.shape[1:]) for part, rows in picked.items()}


class GateUp(MegatronParamMapping):
    """Each shard is its part of the gate, then its part of the up projection."""

    def megatron_to_hf(self, weights: torch.Tensor, module: Any) -> dict[str, torch.Tensor]:
        shards = self.gather_from_tp_ranks(weights) if self.tp_size > 1 else [weights]
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        gate, up = self.hf_param
        return {
            **self.gathered(gate, torch.cat(gates), module),
            **self.gathered(up, torch.cat(ups), module),
        }


@dataclass
class Task:
    """What verl reads of a conversion task; without a weight on ranks of other pipeline stages."""

    global_param_name: str
    mapping: MegatronParamMapping
    param_weight: torch.Tensor | None = None
    megatron_module: Any = None


class Bridge:
    """Stands for AutoBridge: `get_conversion_tasks` of a Qwen model.

    tied       whether the output layer is the embedding, which the last pipeline stage then has a replica of
    both_tied  whether that is listed, too; Megatron-Bridge lists the embedding alone
    """

    def __init__(self, tied: bool = False, both_tied: bool = False) -> None:
        self.tied, self.both_tied = tied, both_tied

    def get_conversion_tasks(self, models: list[Any]) -> list[Task]:
        own = {_global_name(model, name): (model, name) for model in models for name, _ in model.named_parameters()}
        stages: list[Any] = [None] * mpu.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(stages, list(own), group=mpu.get_pipeline_model_parallel_group())
        tasks = []
        for name in dict.fromkeys(name for names in stages for name in names):
            if name == OUTPUT and self.tied and not self.both_tied:
                continue
            task = Task(name, mapping_of(EMBEDDING if name == OUTPUT and self.tied else name))
            if name in own:
                model, local_name = own[name]
                owner, _, leaf = local_name.rpartition(".")
                task.megatron_module = model.get_submodule(owner)
                task.param_weight = getattr(task.megatron_module, leaf)
            tasks.append(task)
        return tasks


def training_engine(models: list[Any], hf_config: Any, bridge: Any) -> Any:
    """As much of verl's Megatron engine as is read."""
    return SimpleNamespace(
        bridge=bridge,
        module=models,
        model_config=SimpleNamespace(hf_config=hf_config),
        vanilla_bridge=False,
        peft_cls=None,
    )


def _global_name(model: Any, name: str) -> str:
    """Layers counted over all pipeline stages and model chunks, experts over all expert parallel ranks."""
    if found := re.match(r"decoder\.layers\.(\d+)\.", name):
        layer = model.decoder.layers[int(found[1])]
        name = f"decoder.layers.{layer.layer_number - 1}.{name[found.end() :]}"
        if found := re.search(r"local_experts\.(\d+)\.", name):
            first = mpu.get_expert_model_parallel_rank() * layer.mlp.num_local_experts
            name = f"{name[: found.start(1)]}{first + int(found[1])}{name[found.end(1) :]}"
    return name


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
OF_MODEL = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
OF_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def mapping_of(name: str) -> MegatronParamMapping:
    if name in OF_MODEL:
        return Auto(name, OF_MODEL[name])
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if rest in OF_LAYER:
        return Auto(name, prefix + OF_LAYER[rest])
    if rest.startswith("self_attention.linear_qkv."):
        kind = rest.rpartition(".")[2]
        return QueryKeyValue(name, {part: f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"})
    expert = re.match(r"mlp\.experts\.local_experts\.(\d+)\.", rest)
    mlp = f"{prefix}mlp.experts.{expert[1]}." if expert else f"{prefix}mlp."
    if rest.endswith("linear_fc1.weight"):
        return GateUp(name, (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"))
    assert rest.endswith("linear_fc2.weight"), name
    return Auto(name, f"{mlp}down_proj.weight")
