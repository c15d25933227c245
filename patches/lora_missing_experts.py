"""sglang.srt.lora.mem_pool: gives an adapter zeros for the experts' and the embedding's matrices that it does not have.

SGLang 0.5.12 writes nothing into the experts' part of a slot for an adapter without them. Requests would be computed
with the matrices of the adapter that had the slot before; 0.5.23 clears them. Zeros for one expert are enough, as
SGLang clears the slot before it writes the experts that an adapter has.

Both leave the head's part of a slot as it was for an adapter of the embedding only, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager

# SGLang's names of a projection in checkpoints of adapters.
_NAMES = {"gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}


def zeros(manager: LoRAManager, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Returns lora_A and lora_B, all zeros, of an expert for every layer and projection that `tensors` lacks.

    rank  the adapter's
    """
    return {
        f"base_model.model.{name}.0.{projection}.lora_{matrix}.weight": torch.zeros(shape)
        for layer, name, module in _layers_of_experts(manager)
        for projection in _NAMES
        if not _has(tensors, name, projection)
        for matrix, shape in _shapes(manager, layer, module, projection, rank)
    }


def embedding_zeros(manager: LoRAManager, held: Iterable[str], rank: int) -> dict[str, torch.Tensor]:
    """Returns one matrix, of zeros, for the embedding or the head if an adapter that holds these has the other only."""
    pool, found = manager.memory_pool, {}
    names = " ".join(held)
    if "lm_head" in names and manager.embed_tokens_module is not None and "embed_tokens" not in names:
        found["embed_tokens.lora_embedding_B"] = torch.zeros(pool.embedding_B_buffer["embed_tokens"].shape[-2], rank)
    if "embed_tokens" in names and manager.lm_head_module is not None and "lm_head" not in names:
        found["lm_head.lora_A.weight"] = torch.zeros(rank, pool.lm_head_A_buffer["lm_head"].shape[-1])
    return found


def _layers_of_experts(manager: LoRAManager) -> Iterator[tuple[int, str, Any]]:
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    for layer, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            if isinstance(module, FusedMoEWithLoRA):
                yield layer, name, module


def _has(tensors: Mapping[str, torch.Tensor], module: str, projection: str) -> bool:
    """Returns whether an adapter adapts a projection of any expert of `module`. Prefixes of names may differ."""
    owner = f".{module[module.index('layers.') :]}."
    parts = ({*tensor.rpartition(owner)[2].split(".")} for tensor in tensors if owner in f".{tensor}")
    return any(not found.isdisjoint(_NAMES[projection]) for found in parts)


def _shapes(
    manager: LoRAManager, layer: int, module: Any, projection: str, rank: int
) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Returns the sizes of an expert's matrices as a checkpoint has them: not cut for this engine rank."""
    pool, key = manager.memory_pool, f"{projection}_moe"
    inputs, outputs = pool.A_buffer[key][layer].shape[-1], pool.B_buffer[key][layer].shape[-2]
    if projection == "down_proj":
        inputs *= module.tp_size
    else:
        outputs *= module.tp_size
    return ("A", (rank, inputs)), ("B", (outputs, rank))
