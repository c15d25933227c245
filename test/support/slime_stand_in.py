"""Stands for as much of slime and of miles as surrounds a weight update: their Megatron actor, and what it imports.

Written from the interface of slime at 624b824a898a and of miles at 31f1ca961a94, which need GPUs and are not installed.
With their packages `slime` and `miles` in the folder SLIME_SOURCE, an environment variable, their own names and
converters are used.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import mpu

from support.megatron_bridge import OF_LAYER, OF_MODEL
from support.megatron_models import Case

SOURCE = "SLIME_SOURCE"
EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = "module.module."  # of all names: Megatron's DDP wraps a module that wraps the model


def install(trainer: str) -> None:
    """Makes "slime" or "miles", as far as it stands here, and the examples importable. Replaces `ray.get`."""
    _package(f"{trainer}.utils.distributed_utils").get_gloo_group = lambda: dist.group.WORLD
    _package(f"{trainer}.backends.megatron_utils.actor").UpdateWeightFromDistributed = None
    if SOURCE not in os.environ:
        _package(f"{trainer}.backends.megatron_utils.megatron_to_hf").convert_to_hf = convert_to_hf
        common = _package(f"{trainer}.backends.megatron_utils.update_weight.common")
        common.named_params_and_buffers = named_params_and_buffers
    ray.get = lambda answers: answers
    sys.path.append(str(EXAMPLES))


def _package(name: str) -> Any:
    """Returns a module; its parents are packages whose other modules are those of the checkout, if there is one."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        if end < len(parts):
            module.__path__ = [str(Path(os.environ[SOURCE], *parts[:end]))] if SOURCE in os.environ else []
    return sys.modules[name]


class Engine:
    """A handle of the Ray actor that owns a server. `remote` returns the answer itself."""

    def __init__(self, trainer: str, url: str, actor: str) -> None:
        self._name = f"Actor(SGLangEngine, {actor})"
        if trainer == "slime":
            self.get_url = SimpleNamespace(remote=lambda: url)
        else:
            self.get_topology_info = SimpleNamespace(remote=lambda: {"url": url, "node_rank": 0})

    def __repr__(self) -> str:
        return self._name


class Wrapped(torch.nn.Module):
    """Stands for Megatron-Core's Float16Module around a model chunk."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.config = module, module.config


class Actor:
    """A trainer rank's `MegatronTrainRayActor`: its calls of the weight updater, in the order of each trainer.

    hook  `--custom-megatron-init-path`: the path of a function
    """

    def __init__(self, trainer: str, args: Namespace, model: Sequence[Any], hook: str) -> None:
        module, _, function = hook.rpartition(".")
        getattr(importlib.import_module(module), function)(args)
        make = sys.modules[f"{trainer}.backends.megatron_utils.actor"].UpdateWeightFromDistributed
        if trainer == "miles" and SOURCE in os.environ:
            parallel = importlib.import_module("miles.backends.training_utils.parallel")
            size, rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
            parallel.set_parallel_state(SimpleNamespace(ep=SimpleNamespace(size=size, rank=rank)))
        self.trainer, own = trainer, {"is_lora": False} if trainer == "miles" else {}
        given = {"model_name": "qwen3moeconfig" if args.num_experts else "qwen3config", "quantization_config": None}
        chunks = [Wrapped(chunk) for chunk in model]
        self.weight_updater = make(args, chunks, weights_getter=dict, **given, **own)
        if trainer == "slime":
            self.weight_updater.weight_version = 0

    def update_weights(self, engines: Sequence[Engine], new: int) -> None:
        """new: engines that are new since the last update"""
        updater = self.weight_updater
        parallel = {"engine_parallel_configs": [{}] * len(engines)} if self.trainer == "slime" else {}
        if new or (self.trainer == "miles" and not updater.is_rollout_engines_fresh()):
            counts, offsets = [2] * len(engines), [2 * number for number in range(len(engines))]
            updater.connect_rollout_engines(
                engines, "a lock", engine_gpu_counts=counts, engine_gpu_offsets=offsets, **parallel
            )
            dist.barrier()
        updater.update_weights()

    def log(self) -> dict[str, float]:
        return self.weight_updater.pop_metrics()

    def sleep(self) -> None:
        if hasattr(self.weight_updater, "disconnect_rollout_engines"):
            self.weight_updater.disconnect_rollout_engines()


def arguments(case: Case, **changed: Any) -> Namespace:
    """The trainer's arguments that are read, of a test's model."""
    given = {
        "colocate": False,
        "update_weight_transport": "nccl",
        "update_weight_transfer_mode": "broadcast",
        "indep_dp": False,
        "untie_embeddings_and_output_weights": not case.tied,
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "kv_channels": case.head,
        "num_attention_heads": case.heads,
        "num_query_groups": case.groups,
        "num_experts": case.experts,
        "q_lora_rank": None,
    }
    return Namespace(**given | changed)


def named_params_and_buffers(args: Namespace, model: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields this rank's parameters; layers and experts have the numbers that they have in the whole model."""
    for chunk in model:
        for name, parameter in chunk.module.named_parameters():
            if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*?)(\d*)", name):
                number, rest, expert = found.groups()
                layer = chunk.module.decoder.layers[int(number)]
                if expert:
                    expert = mpu.get_expert_model_parallel_rank() * layer.mlp.num_local_experts + int(expert)
                name = f"decoder.layers.{layer.layer_number - 1}.{rest}{expert}"
            yield ROOT + name, parameter


# Transformer Engine has norms in the linear layers behind them.
_OF_LAYER = OF_LAYER | {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}


def convert_to_hf(
    args: Namespace, model_name: str, name: str, param: torch.Tensor, quantization_config: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Returns the checkpoint tensors in a gathered parameter."""
    name = name.removeprefix(ROOT)
    if name in OF_MODEL:
        return [(OF_MODEL[name], param[: args.vocab_size] if "norm" not in name else param)]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if rest in _OF_LAYER:
        return [(prefix + _OF_LAYER[rest], param)]
    if rest.startswith("self_attention.linear_qkv."):
        return [(f"{prefix}self_attn.{part}_proj.{rest[26:]}", tensor) for part, tensor in _of_heads(args, param)]
    if expert := re.fullmatch(r"mlp\.experts\.(linear_fc\d)\.weight(\d+)", rest):
        prefix, rest = f"{prefix}mlp.experts.{expert[2]}.", expert[1]
    else:
        prefix, rest = f"{prefix}mlp.", rest.removeprefix("mlp.").removesuffix(".weight")
    if rest == "linear_fc2":
        return [(f"{prefix}down_proj.weight", param)]
    assert rest == "linear_fc1", name
    return [(f"{prefix}{kind}_proj.weight", half) for kind, half in zip(("gate", "up"), param.chunk(2), strict=True)]


def _of_heads(args: Namespace, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields queries, keys and values, of which each group of heads has its own together."""
    queries = args.num_attention_heads // args.num_query_groups
    grouped = param.unflatten(0, (args.num_query_groups, queries + 2, args.kv_channels))
    for part, heads in zip("qkv", grouped.split([queries, 1, 1], dim=1), strict=True):
        yield part, heads.flatten(0, 2)
