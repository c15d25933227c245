"""sglang.srt.lora.lora_registry: gives updated adapters their names, which requests use.

The tokenizer manager's registry maps an adapter's name to its lora_id, which is all that its other processes know. A
name keeps its id over updates.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import sound_weights, weights_info
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, LoraAdapter
from sglang_reshard.shown_names import some_names

if TYPE_CHECKING:
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = get_logger(__name__)


def refusal(manager: TokenizerManager, adapter: LoraAdapter) -> str:
    """Returns why an engine can have no such adapter; empty if it can."""
    if not manager.server_args.enable_lora:
        return (
            f"the engine was started without LoRA, so it cannot serve the adapter {adapter.name}; start it with "
            "enable_lora=True, max_lora_rank and lora_target_modules"
        )
    registry, limit = manager.lora_registry, manager.server_args.max_loaded_loras
    if limit is not None and adapter.name not in (loaded := registry.get_all_adapters()) and len(loaded) >= limit:
        return (
            f"the engine has {len(loaded)} LoRA adapters, as many as max_loaded_loras={limit} allows; unload one of "
            f"them before you send {adapter.name}"
        )
    return ""


def counted_twice(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> str:
    """Returns why requests would get an adapter twice, as it is merged into the weights; empty if they would not."""
    if request.lora is not None:
        merged, also = weights_info.of(manager).merged, request.lora.name
    else:
        serves = request.merged and manager.server_args.enable_lora
        merged, also = request.merged, some_names(list(manager.lora_registry.get_all_adapters())) if serves else ""
    if not (merged and also):
        return ""
    return (
        f"the LoRA adapters {some_names(merged)} are merged into the weights, and requests for {also} would get an "
        "adapter on top of them. Call unmerge_adapter() and send base_tensors(model), or unload the engine's adapters "
        "and send merged weights only"
    )


def with_lora_id(manager: TokenizerManager, adapter: LoraAdapter) -> LoraAdapter:
    """Adds the id that requests for the adapter's name have, or a new one."""
    known = manager.lora_registry.get_all_adapters().get(adapter.name)
    return msgspec.structs.replace(adapter, lora_id=uuid.uuid4().hex if known is None else known.lora_id)


async def updated(manager: TokenizerManager, adapter: LoraAdapter) -> None:
    """Lets requests ask for the adapter, after a successful update."""
    if adapter.name not in manager.lora_registry.get_all_adapters():
        await manager.lora_registry.register(reference(adapter))
    manager.lora_ref_cache.pop(adapter.name, None)  # from its folder SGLang would load old weights again


def unload(manager: TokenizerManager, adapter: LoraAdapter, reason: str) -> None:
    """Refuses requests for an adapter whose weights may differ between engine ranks, until it is updated."""
    logger.error("The LoRA adapter %s is unloaded until an update of it succeeds: %s", adapter.name, reason)
    # Not by its coroutine, as the caller may have been cancelled.
    manager.lora_registry._registry.pop(adapter.name, None)
    manager.lora_ref_cache.pop(adapter.name, None)
    if manager.is_pause:  # no other request can be half done
        sound_weights.abort_all(manager)


def reference(adapter: LoraAdapter) -> LoRARef:
    """Returns SGLang's reference to an adapter. Its path is none from which SGLang could load it."""
    from sglang.srt.lora.lora_registry import LoRARef

    path = f"sglang-reshard/{adapter.name}"
    return LoRARef(lora_id=adapter.lora_id, lora_name=adapter.name, lora_path=path, pinned=False)
