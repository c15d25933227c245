"""sglang.srt.lora.lora_registry: gives updated adapters their names, which requests use.

The tokenizer manager's registry maps an adapter's name to its lora_id, which is all that its other processes know. A
name keeps its id over updates.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
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


def refusal(manager: TokenizerManager, adapters: Sequence[LoraAdapter]) -> str:
    """Returns why an engine cannot have these adapters; empty if it can."""
    names = [adapter.name for adapter in adapters]
    if not manager.server_args.enable_lora:
        return (
            f"the engine was started without LoRA, so it cannot serve the adapter {some_names(names)}; start it with "
            "enable_lora=True, max_lora_rank and lora_target_modules"
        )
    if twice := next((name for name in names if names.count(name) > 1), ""):
        return f"the LoRA adapter {twice} is sent twice in one update; give each adapter another name"
    loaded, limit = manager.lora_registry.get_all_adapters(), manager.server_args.max_loaded_loras
    new = [name for name in names if name not in loaded]
    if limit is not None and new and len(loaded) + len(new) > limit:
        return (
            f"the engine has {len(loaded)} LoRA adapters, and with {some_names(new)} it would have more than "
            f"max_loaded_loras={limit} allows; unload others before you send new ones"
        )
    return ""


def counted_twice(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> str:
    """Returns why requests would get an adapter twice, as it is merged into the weights; empty if they would not."""
    if request.lora:
        merged, also = weights_info.of(manager).merged, some_names([adapter.name for adapter in request.lora])
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


def with_lora_ids(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsReq:
    """Adds the ids that requests for the adapters' names have, or new ones."""
    ids = {name: found.lora_id for name, found in manager.lora_registry.get_all_adapters().items()}
    lora = (msgspec.structs.replace(a, lora_id=ids.get(a.name) or uuid.uuid4().hex) for a in request.lora)
    return msgspec.structs.replace(request, lora=tuple(lora))


async def updated(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> None:
    """Lets requests ask for the adapters, after a successful update."""
    known, live = manager.lora_registry.get_all_adapters(), weights_info.of(manager)
    live.adapters = {found.lora_id: live.adapters.get(found.lora_id, "") for found in known.values()}
    for adapter in request.lora:
        if adapter.name not in known:
            await manager.lora_registry.register(reference(adapter))
        manager.lora_ref_cache.pop(adapter.name, None)  # from its folder SGLang would load old weights again
        live.adapters[adapter.lora_id] = adapter.version or request.weight_version or ""


def unload(manager: TokenizerManager, adapters: Sequence[LoraAdapter], reason: str) -> None:
    """Refuses requests for adapters whose weights may differ between engine ranks, until they are updated."""
    names = [adapter.name for adapter in adapters]
    logger.error("The LoRA adapter %s is unloaded until an update of it succeeds: %s", some_names(names), reason)
    for name in names:  # not by its coroutine, as the caller may have been cancelled
        manager.lora_registry._registry.pop(name, None)
        manager.lora_ref_cache.pop(name, None)
    if manager.is_pause:  # no other request can be half done
        sound_weights.abort_all(manager)


def reference(adapter: LoraAdapter) -> LoRARef:
    """Returns SGLang's reference to an adapter. Its path is none from which SGLang could load it."""
    from sglang.srt.lora.lora_registry import LoRARef

    path = f"sglang-reshard/{adapter.name}"
    return LoRARef(lora_id=adapter.lora_id, lora_name=adapter.name, lora_path=path, pinned=False)
