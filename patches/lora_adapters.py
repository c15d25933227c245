"""sglang.srt.lora: makes received tensors the weights of a LoRA adapter that the engine serves.

SGLang keeps an adapter whole on every engine rank, in host memory, and cuts out the rank's part when it copies the
adapter into a slot of its memory pool. So the tensors arrive whole, in separate memory, and replace the served adapter
once all ranks have them: under the same lora_id, in a slot that is loaded again.

    lora_adapters.receiver(model_runner, adapter, rank, size)    # a WeightReceiver
    lora_adapters.refusal(model_runner, adapter)

`lora_names` is the tokenizer manager's part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import ReceivedAdapter
from sglang_reshard.errors import EngineRefused, Mismatch
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches import lora_missing_experts, lora_trial
from sglang_reshard.patches.lora_names import reference
from sglang_reshard.protocol.messages import LoraAdapter

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.model_runner import ModelRunner

_RECEIVERS = "_reshard_lora_receivers"  # on the model runner: adapter's name -> its tensors, and what receives them


class _AdapterTensors(ReceivedAdapter):
    """Receives `adapter`, which is of the update under way."""

    def __init__(self, manager: LoRAManager, adapter: LoraAdapter) -> None:
        super().__init__(manager.device)
        self._manager, self.adapter = manager, adapter

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raises Mismatch for tensors that are not of an adapter of this rank, or that SGLang would not serve."""
        rank = json.loads(self.adapter.config)["r"]
        for spec in specs:
            _check_tensor(spec, rank)
        if reason := lora_trial.refusal(self._manager, self.adapter, specs):
            raise Mismatch(reason)

    def use(self) -> None:
        # SGLang keeps host tensors as they are, and this memory is written again.
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}
        _install(self._manager, self.adapter, tensors)


def receiver(runner: ModelRunner, adapter: LoraAdapter, rank: int, size: int) -> WeightReceiver:
    """Returns what receives `adapter` on engine rank `rank` of `size`; the same as long as its configuration is."""
    manager = runner.lora_manager
    receivers: dict[str, tuple[_AdapterTensors, WeightReceiver]] = getattr(runner, _RECEIVERS, {})
    setattr(runner, _RECEIVERS, receivers)
    for name in [n for n, (tensors, _) in receivers.items() if _is_over(tensors.adapter, adapter, manager)]:
        receivers.pop(name)[1].close()
    if adapter.name not in receivers:
        tensors = _AdapterTensors(manager, adapter)
        receivers[adapter.name] = tensors, WeightReceiver(tensors, rank, size, manager.device)
    tensors, found = receivers[adapter.name]
    tensors.adapter = adapter
    return found


def _is_over(adapter: LoraAdapter, current: LoraAdapter, manager: LoRAManager) -> bool:
    """Returns whether an adapter was unloaded, or has another configuration now."""
    if adapter.name == current.name:
        return adapter.config != current.config
    return adapter.lora_id not in manager.loras


def refusal(runner: ModelRunner, adapter: LoraAdapter) -> str:
    """Returns why the engine cannot serve such an adapter; empty if it can."""
    from sglang.srt.lora.lora_config import LoRAConfig

    manager = runner.lora_manager
    for ref in list(manager.lora_refs.values()):
        if ref.lora_name == adapter.name and ref.lora_id != adapter.lora_id:  # the tokenizer manager has unloaded it
            manager.unload_lora_adapter(ref)
    try:
        config = LoRAConfig.from_dict(json.loads(adapter.config), base_vocab_size=manager.base_hf_config.vocab_size)
        if adapter.lora_id not in manager.loras:
            manager.validate_new_adapter(config, reference(adapter))
        elif not manager.memory_pool.can_support(config):
            return (
                f"the LoRA adapter {adapter.name} has rank {config.r} and modules {config.target_modules}, which do "
                "not fit the engine's memory pool; start the engine with a larger max_lora_rank, or with these "
                "lora_target_modules"
            )
    except (ValueError, KeyError) as error:
        return str(error)
    return ""


def _install(manager: LoRAManager, adapter: LoraAdapter, tensors: dict[str, torch.Tensor]) -> None:
    """Makes `tensors` the weights of the adapter, also in the memory pool if it is there or a slot is empty."""
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    config, lora_id, pool = json.loads(adapter.config), adapter.lora_id, manager.memory_pool
    tensors = tensors | lora_missing_experts.zeros(manager, tensors, config["r"])
    if lora_id in manager.loras:
        vocabulary = manager.base_hf_config.vocab_size
        manager.configs[lora_id] = LoRAConfig.from_dict(config, base_vocab_size=vocabulary)
        manager.load_lora_weights_from_tensors(manager.lora_refs[lora_id], tensors)
    else:
        loaded = manager.load_lora_adapter_from_tensors(reference(adapter), tensors, config)
        if not loaded.success:
            raise EngineRefused(f"SGLang did not load the LoRA adapter {adapter.name}: {loaded.error_message}")
    embeddings = manager.loras[lora_id].embedding_layers
    embeddings |= lora_missing_experts.embedding_zeros(manager, embeddings, config["r"])
    if (slot := pool.uid_to_buffer_id.pop(lora_id, None)) is not None:
        pool.buffer_id_to_uid[slot] = EMPTY_SLOT
        pool.eviction_policy.remove(lora_id)
    if EMPTY_SLOT in pool.buffer_id_to_uid:  # else SGLang makes room when a request comes
        manager.fetch_new_loras({lora_id})


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
