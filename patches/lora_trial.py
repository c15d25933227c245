"""sglang.srt.lora: tries an adapter with tensors and slots that take no memory, before the engine receives it.

SGLang learns that it cannot load an adapter when it loads it into a slot: for a request if all slots are taken, which
ends the engine. It drops tensors of modules that it does not adapt.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.patches import lora_missing_experts
from sglang_reshard.protocol.messages import LoraAdapter

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager


def refusal(manager: LoRAManager, adapter: LoraAdapter, specs: Sequence[TensorSpec]) -> str:
    """Returns why SGLang would not serve an adapter with all of these tensors; empty if it would."""
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    options = json.loads(adapter.config)
    config = LoRAConfig.from_dict(options, base_vocab_size=manager.base_hf_config.vocab_size)
    tried = LoRAAdapter(
        adapter.lora_id,
        config,
        manager.base_hf_config,
        manager.load_config,
        manager.lora_backend,
        base_model=manager.base_model,
    )
    nothing = torch.zeros((), dtype=torch.uint8)  # of bytes, as SGLang makes stacked tensors of these
    tensors: dict[str, torch.Tensor] = {spec.name: nothing.expand(spec.shape) for spec in specs}
    try:
        for name, tensor in (tensors | lora_missing_experts.zeros(manager, tensors, options["r"])).items():
            tried._process_weight(name, tensor)
        if name := _dropped(tried, tensors):
            return f"the LoRA adapter {adapter.name}: {name}: SGLang serves no adapter of this module. {_ADVICE}"
        tried._normalize_weights()
        if name := _not_served(manager, tried):
            why = "the engine adapts no such module of this layer, or an adapter of another one"
            return f"the LoRA adapter {adapter.name}: {name}: {why}. {_ADVICE}"
        modules = manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
        _without_memory(manager.memory_pool).load_lora_weight_to_buffer(adapter.lora_id, 0, tried, *modules)
    except (AssertionError, IndexError, KeyError, RuntimeError, ValueError) as error:
        return f"SGLang cannot load the LoRA adapter {adapter.name}: {type(error).__name__}: {error}. {_ADVICE}"
    return ""


_ADVICE = (
    "Adapt q_proj, k_proj and v_proj together, and gate_proj with up_proj; leave other modules out of target_modules, "
    "or merge the adapter into the weights"
)


def _dropped(adapter: LoRAAdapter, names: Iterable[str]) -> str:
    """Returns a tensor that SGLang has dropped; empty if it has none."""
    held = set(adapter.embedding_layers).union(*(layer.weights for layer in adapter.layers))
    return next((name for name in names if name.replace("unembed_tokens", "lm_head") not in held), "")


def _not_served(manager: LoRAManager, adapter: LoRAAdapter) -> str:
    """Returns a tensor that would not reach a slot; empty if there is none. Raises ValueError for an unknown module."""
    from sglang.srt.lora.utils import get_target_module_name

    for layer, modules in zip(adapter.layers, manager.lora_modules, strict=True):
        dense = [name for name in modules if any(target in name for target in manager.target_modules)]
        experts = len(dense) < len(modules)  # their module has none of their projections' names
        free = {(get_target_module_name(name, manager.target_modules), matrix) for name in dense for matrix in "AB"}
        for name in layer.weights:
            if experts and "experts." in name:
                continue
            target = get_target_module_name(name, manager.target_modules), "A" if "lora_A" in name else "B"
            if target not in free:
                return name
            free.remove(target)
    return ""


def _without_memory(pool: Any) -> Any:
    """Returns a memory pool whose buffers have the shapes of another one's."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, list):
            return [on_meta(one) for one in value]
        return {key: on_meta(one) for key, one in value.items()} if isinstance(value, dict) else value

    tried = copy.copy(pool)
    vars(tried).update({name: on_meta(value) for name, value in vars(pool).items() if name.endswith("_buffer")})
    return tried
