"""sglang.srt.model_loader: remembers modules as they are built, which SGLang repacks once they are loaded.

`sglang_reshard.trace.repack` makes an update repack them again.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_reshard.trace.built_modules import built_module
from sglang_reshard.trace.built_modules import remember as remember_module
from sglang_reshard.trace.folded import remember_built


def remember(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Must be called with a model that has just been built."""
    remember_built(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        # Scales of the KV cache are taken over by themselves, see `trace.kv_scales`.
        of_kv_cache = any(base.__name__ == "BaseKVCacheMethod" for base in type(method).__mro__)
        if callable(getattr(method, "process_weights_after_loading", None)) and not of_kv_cache:
            remember_module(module, _process, _reorders)


def refusal(model: torch.nn.Module) -> str:
    """Returns why the live weights cannot be updated; empty if they can, as far as is known.

    Most repacking changes shapes, which the trace rejects. These kinds keep the shape and change the elements, so that
    weights written in the loader's layout would be silently wrong.
    """
    for name, module in model.named_modules():
        if not module._parameters or built_module(module) is not None:
            continue
        if why := _reordering(module):
            return (
                f"{name} was {why} after loading, by a loader of SGLang's that does not say how it was before; start "
                "the engine with another load_format"
            )
    return ""


class _QuietDispatcher:
    """Stands in for the live dispatcher of experts while a copy of them is post-processed.

    NVFP4's post-processing hands the scale of activations to the dispatcher. The live one has the live tensor since the
    engine's start, and would get the copy's: until the end of the update, or of random values in a rehearsal.
    """

    def __init__(self, live: object) -> None:
        self._live = live

    def __getattr__(self, name: str) -> Any:
        return getattr(self._live, name)

    def set_quant_config(self, quant_config: object) -> None:
        """Does nothing."""


def _process(copy: torch.nn.Module) -> None:
    if (dispatcher := vars(copy).get("dispatcher")) is not None:
        vars(copy)["dispatcher"] = _QuietDispatcher(dispatcher)
    method: Any = copy.quant_method
    method.process_weights_after_loading(copy)


def _reorders(module: torch.nn.Module) -> bool:
    """Returns whether elements may have moved although all parameters look as they were built."""
    return bool(_reordering(module)) or not _keeps_layout(module.quant_method)


def _reordering(module: torch.nn.Module) -> str:
    """Returns what is known to have been done to a module's parameters; empty if nothing is."""
    if getattr(module, "use_intel_amx_backend", False):
        return "packed for AMX"
    if getattr(module, "use_flashinfer_trtllm_moe", False):  # of experts, however they are quantized
        return "reordered for flashinfer-trtllm"
    # On Blackwell. No checkpoint has scales in 32-bit integers: each is four exponents (UE8M0).
    if any("scale" in n and p.dtype == torch.int32 for n, p in module.named_parameters(recurse=False)):
        return "requantized for DeepGEMM (its scales are UE8M0)"
    return ""


def _keeps_layout(method: object) -> bool:
    """Returns whether a quantization method is one whose post-processing leaves parameters that look the same."""
    if type(method).__name__.startswith("Unquantized"):
        return True
    config = getattr(method, "quant_config", None)
    blocks = bool(getattr(config, "weight_block_size", None)) and not getattr(config, "use_mxfp8", False)
    return blocks and type(method).__name__ in ("Fp8LinearMethod", "Fp8MoEMethod")
