"""sglang.srt.lora: makes received tensors the weights of the LoRA adapters that the engine serves.

SGLang keeps an adapter whole on every engine rank, in host memory, and cuts out the rank's part when it copies the
adapter into a slot of its memory pool. So the tensors arrive whole, in separate memory, and replace the served adapters
once all ranks have them: under the same lora_ids, in slots that are loaded again.

    lora_adapters.receiver(model_runner, request, rank, size)    # a WeightReceiver
    lora_adapters.refusal(model_runner, adapters)

`lora_names` is the tokenizer manager's part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import ReceivedAdapter
from sglang_reshard.errors import EngineRefused, Mismatch
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches import lora_missing_experts, lora_trial
from sglang_reshard.patches.attached import attached
from sglang_reshard.patches.lora_names import reference
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, LoraAdapter
from sglang_reshard.shown_names import some_names

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.model_runner import ModelRunner


class _Adapters(ReceivedAdapter):
    """Receives `adapters`, those of the update under way."""

    def __init__(self, manager: LoRAManager) -> None:
        super().__init__(manager.device)
        self._manager, self.adapters = manager, tuple[LoraAdapter, ...]()

    def signature(self) -> int:
        return hash(tuple((adapter.name, adapter.config) for adapter in self.adapters))

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raises Mismatch for tensors that are of no adapter of this rank, or that SGLang would not serve."""
        given = {spec.name: spec for spec in specs}
        tried = set()
        for adapter, names in of_each(self.adapters, given):
            rank = json.loads(adapter.config)["r"]
            for name in names.values():
                _check_tensor(given[name], rank)
            alike = adapter.config, tuple(replace(given[name], name=own) for own, name in names.items())
            if alike not in tried and (reason := lora_trial.refusal(self._manager, adapter, alike[1])):
                raise Mismatch(reason)
            tried.add(alike)

    def use(self) -> None:
        tensors = self.on_host()
        for adapter, names in of_each(self.adapters, tensors):
            _install(self._manager, adapter, {own: tensors[name] for own, name in names.items()})
        _load_slots(self._manager, [adapter.lora_id for adapter in self.adapters])


class _Receivers(dict[str, tuple[_Adapters, WeightReceiver]]):
    """Of one model runner: session -> its adapters, and their receiver."""


def receiver(runner: ModelRunner, request: DistributedUpdateWeightsReq, rank: int, size: int) -> WeightReceiver:
    """Returns what receives the adapters of a session on engine rank `rank` of `size`.

    Closes those of other sessions whose adapters are unloaded, or now come from this one.
    """
    manager, receivers, session = runner.lora_manager, attached(runner, _Receivers), request.address.session
    current = {adapter.name for adapter in request.lora}
    for other, (target, _) in list(receivers.items()):
        loaded = any(adapter.lora_id in manager.loras for adapter in target.adapters)
        if other != session and not (loaded and current.isdisjoint(adapter.name for adapter in target.adapters)):
            receivers.pop(other)[1].close()
    if session not in receivers:
        target = _Adapters(manager)
        receivers[session] = target, WeightReceiver(target, rank, size, manager.device)
    target, found = receivers[session]
    target.adapters = request.lora
    return found


def of_each(adapters: Sequence[LoraAdapter], names: Iterable[str]) -> list[tuple[LoraAdapter, dict[str, str]]]:
    """Returns each adapter with its tensors: name in the adapter's checkpoint -> name in the update.

    Raises Mismatch for an adapter without tensors, and for tensors that are of none.
    """
    found: dict[str, dict[str, str]] = {adapter.name: {} for adapter in adapters}
    for name in names:
        owner, slash, own = name.rpartition("/")
        owner = owner if slash or len(adapters) > 1 else adapters[0].name
        if owner not in found:
            raise Mismatch(
                f"{name} is a tensor of none of the adapters {some_names(list(found))}; pass the tensors of each "
                "adapter with it, see WeightSender.lora_adapters"
            )
        found[owner][own] = name
    if empty := [name for name, own in found.items() if not own]:
        raise Mismatch(f"the LoRA adapter {empty[0]} has no tensors; pass adapter_tensors(model), or leave it out")
    return [(adapter, found[adapter.name]) for adapter in adapters]


def refusal(runner: ModelRunner, adapters: Sequence[LoraAdapter]) -> str:
    """Returns why the engine cannot serve such adapters, naming one; empty if it can."""
    from sglang.srt.lora.lora_config import LoRAConfig

    manager = runner.lora_manager
    ids = {adapter.name: adapter.lora_id for adapter in adapters}
    for ref in list(manager.lora_refs.values()):
        if ids.get(ref.lora_name, ref.lora_id) != ref.lora_id:  # the tokenizer manager has unloaded it
            manager.unload_lora_adapter(ref)
    try:
        for adapter in adapters:
            config = LoRAConfig.from_dict(json.loads(adapter.config), base_vocab_size=manager.base_hf_config.vocab_size)
            if adapter.lora_id not in manager.loras:
                manager.validate_new_adapter(config, reference(adapter))
            elif not manager.memory_pool.can_support(config):
                return (
                    f"the LoRA adapter {adapter.name} has rank {config.r} and modules {config.target_modules}, which "
                    "do not fit the engine's memory pool; start the engine with a larger max_lora_rank, or with these "
                    "lora_target_modules"
                )
    except (ValueError, KeyError) as error:
        return f"the LoRA adapter {adapter.name} is refused: {error}"
    return ""


def _install(manager: LoRAManager, adapter: LoraAdapter, tensors: dict[str, torch.Tensor]) -> None:
    """Makes `tensors` the weights of the adapter."""
    from sglang.srt.lora.lora_config import LoRAConfig

    config, lora_id = json.loads(adapter.config), adapter.lora_id
    received = next(iter(tensors.values())).untyped_storage().data_ptr()  # of all
    tensors = tensors | lora_missing_experts.zeros(manager, tensors, config["r"])
    if lora_id in manager.loras:
        manager.configs[lora_id] = LoRAConfig.from_dict(config, base_vocab_size=manager.base_hf_config.vocab_size)
        manager.load_lora_weights_from_tensors(manager.lora_refs[lora_id], tensors)
    else:
        loaded = manager.load_lora_adapter_from_tensors(reference(adapter), tensors, config)
        if not loaded.success:
            raise EngineRefused(f"SGLang did not load the LoRA adapter {adapter.name}: {loaded.error_message}")
    held = manager.loras[lora_id]
    held.embedding_layers |= lora_missing_experts.embedding_zeros(manager, held.embedding_layers, config["r"])
    for weights in (held.embedding_layers, *(layer.weights for layer in held.layers)):
        for name, weight in weights.items():  # SGLang keeps some as they are, and this memory is written again
            if weight.untyped_storage().data_ptr() == received:
                weights[name] = weight.clone()


def _load_slots(manager: LoRAManager, lora_ids: Sequence[str]) -> None:
    """Loads adapters into their slots again, and others into empty ones. SGLang makes room for the rest on request."""
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    pool = manager.memory_pool
    served = [lora_id for lora_id in lora_ids if lora_id in pool.uid_to_buffer_id]
    for lora_id in served:
        pool.buffer_id_to_uid[pool.uid_to_buffer_id.pop(lora_id)] = EMPTY_SLOT
        pool.eviction_policy.remove(lora_id)
    empty = pool.buffer_id_to_uid.count(EMPTY_SLOT)
    manager.fetch_new_loras({*[*served, *(i for i in lora_ids if i not in served)][:empty]})


def _check_tensor(spec: TensorSpec, rank: int) -> None:
    matrix, _, _ = spec.name.rpartition(".lora_")[2].partition(".")
    of_rank = {"A": -2, "B": -1, "embedding_A": -2, "embedding_B": -1}.get(matrix)
    if of_rank is None:
        raise Mismatch(f"{spec.name} is no tensor of a LoRA adapter; pass sources.adapter_tensors(model)")
    if len(spec.shape) < 2 or spec.shape[of_rank] != rank:
        raise Mismatch(
            f"{spec.name} has shape {spec.shape}, which is not of an adapter of rank {rank}. Pass the configuration of "
            "the adapter that is sent"
        )
