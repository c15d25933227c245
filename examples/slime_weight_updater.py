"""slime and miles: Megatron-Core trainer ranks send their shards to the rollout engines, without `--colocate`.

    --custom-megatron-init-path slime_weight_updater.use_in_slime    # for miles: use_in_miles

Put this file on the PYTHONPATH of the Ray job, and install sglang-reshard next to SGLang. Both trainers call the
function above in every process, and it replaces the class that their actor uses after that. Their converter runs once
per parameter, without data, to show which elements of the checkpoint a shard holds. See MegatronTrainRayActor in
https://github.com/THUDM/slime/blob/624b824a898a/slime/backends/megatron_utils/actor.py and
https://github.com/radixark/miles/blob/31f1ca961a94/miles/backends/megatron_utils/actor.py.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import ray
import torch
import torch.distributed as dist
from megatron.core import mpu

from sglang_reshard import MultiEngineSender, RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Unsupported
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import Conversion, TracedParameters
from sglang_reshard.trainer.collectives import on_first_rank


def use_in_slime(args: Namespace) -> None:
    _use("slime", args.update_weight_transport == "nccl" and not args.colocate)


def use_in_miles(args: Namespace) -> None:
    _use("miles", args.update_weight_transfer_mode == "broadcast" and not (args.colocate or args.indep_dp))


def _use(trainer: str, broadcasts: bool) -> None:
    if not broadcasts:
        raise Unsupported(f"{trainer}: leave out --colocate, --indep-dp and the mode and transport of weight updates")
    actor: Any = import_module(f"{trainer}.backends.megatron_utils.actor")
    actor.UpdateWeightFromDistributed = functools.partial(ShardUpdater, trainer)


class ShardUpdater:
    """One trainer rank's end of the updates. All methods that the actor calls are collective, except `pop_metrics`."""

    def __init__(self, trainer: str, args: Namespace, model: Any, weights_getter: Any, **given: Any) -> None:
        if (given["quantization_config"] or {}).get("quant_method", "fp8") != "fp8" or given.get("is_lora"):
            raise Unsupported("LoRA, and quantization other than fp8: leave out --custom-megatron-init-path")
        self.args, self.model, self.model_name = args, model, given["model_name"]
        self.weight_version, self.clients, self.sessions = 0, list[Any](), list[Session]()
        self.sender: MultiEngineSender | None = None
        self.convert = import_module(f"{trainer}.backends.megatron_utils.megatron_to_hf").convert_to_hf
        self.named = import_module(f"{trainer}.backends.megatron_utils.update_weight.common").named_params_and_buffers
        self.group = import_module(f"{trainer}.utils.distributed_utils").get_gloo_group

    def connect_rollout_engines(self, rollout_engines: Any, rollout_engine_lock: Any = None, **_: Any) -> None:
        def connect() -> Any:
            found = ray.get([(getattr(e, "get_url", None) or e.get_topology_info).remote() for e in rollout_engines])
            self.clients = [RemoteEngine(one["url"] if isinstance(one, dict) else one) for one in found]
            newest = max(int(v) if (v := client.check().version).isdecimal() else 0 for client in self.clients)
            if self.sender is None:
                self.sessions = [Session.host(self.clients[0].local_address())]
            # A restarted engine is another actor, so its name is new.
            return list(map(str, rollout_engines)), newest, msgspec.to_builtins(self.sessions[0].address)

        if rollout_engines:
            names, newest, address = on_first_rank(connect, self.group())
            if self.sender is None:
                world, own = tuple(range(dist.get_world_size())), dist.get_rank()
                self.sender = MultiEngineSender(msgspec.convert(address, Address), trainer_rank=own, global_ranks=world)
            sends = [client.update_weights_distributed for client in self.clients] or [None] * len(names)
            self.sender.set_engines(dict(zip(names, sends, strict=True)))
            self.weight_version = max(self.weight_version, newest)  # engines may outlive a trainer

    def is_rollout_engines_fresh(self) -> bool:
        return False  # miles then connects before every update; engines that stay keep their plans and connections

    def disconnect_rollout_engines(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = None

    def update_weights(self) -> None:
        """Raises the errors of `MultiEngineSender.update`. Engines then serve old weights, or refuse requests."""
        if self.sender is None:
            return
        self.weight_version += 1
        mode = getattr(self.args, "pause_generation_mode", "abort")  # an argument of miles
        held = self.parameters.tensors()
        flush: Any = "by_version" if mode == "in_place" else True
        try:
            on_first_rank(lambda: [client.pause_generation(mode) for client in self.clients], self.group())
            reports = self.sender.update(held, weight_version=str(self.weight_version), partial=True, flush_cache=flush)
        finally:
            on_first_rank(lambda: [client.continue_generation() for client in self.clients], self.group())
        self.metrics = {"perf/update_weights_wire_bytes": float(sum(r.received_bytes for r in reports.values()))}

    def pop_metrics(self) -> dict[str, float]:
        return vars(self).pop("metrics", {})

    @functools.cached_property
    def parameters(self) -> TracedParameters:
        return TracedParameters(self._conversions(), trainer_rank=dist.get_rank(), trainer_ranks=dist.get_world_size())

    def _conversions(self) -> Iterator[Conversion]:
        args = Namespace(**{**vars(self.args), "q_lora_rank": None})  # with it slime's converter holds tensors back

        def converted(name: str, parameter: torch.Tensor, shard: torch.Tensor) -> dict[str, torch.Tensor]:
            return dict(self.convert(args, self.model_name, name, _whole(name, parameter, shard)))

        for name, parameter in self.named(self.args, self.model):
            # With tied embeddings it is a copy of the embedding, on the last pipeline stage.
            if self.args.untie_embeddings_and_output_weights or not name.endswith("output_layer.weight"):
                yield Conversion(name, parameter, functools.partial(converted, name, parameter))


def _whole(name: str, parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Returns what a gather would: this rank's shard at its place, and placeholders of other ranks' shards."""
    routed = ".experts." in name and ".shared_experts." not in name
    grouped = routed and "linear_fc" in name and ".weight" in name  # Transformer Engine does not mark these as sharded
    of = "expert_tensor" if routed else "tensor_model"
    ranks, own = getattr(mpu, f"get_{of}_parallel_world_size")(), getattr(mpu, f"get_{of}_parallel_rank")()
    sharded = grouped or getattr(parameter, "tensor_model_parallel", False)
    if ranks == 1 or not sharded or getattr(parameter, "parallel_mode", "") == "duplicated":
        return shard
    parts = shard.chunk(2) if "linear_fc1" in name else (shard,)  # of the gate, and of the up projection
    dim = 1 if "linear_fc2.weight" in name else max(getattr(parameter, "partition_dim", 0), 0)
    return torch.cat([p if rank == own else torch.zeros_like(p) for p in parts for rank in range(ranks)], dim)
