"""Finds what vLLM has changed in a model after loading, so that its loader's layout is no longer the live one.

vLLM calls `process_weights_after_loading` of every layer's quantization method. Some methods leave the weights as they
were loaded; others repack them, or keep a copy that the kernels read. A write to the parameters does not reach those.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# By the name of the class: a subclass may change weights that the class leaves alone.
_LEAVE_WEIGHTS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "_GateLinearMethod")
_EXPERTS, _LEAVE_EXPERTS = "UnquantizedFusedMoEMethod", ("TRITON", "BATCHED_TRITON")
_DERIVED_BY_MLA = ("W_UV", "W_UK_T", "W_K", "W_V")


def refusal(model: torch.nn.Module) -> str:
    """Returns why the weights of a loaded vLLM model cannot be updated in place; empty if they can."""
    return next(_reasons(model), "")


def _reasons(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and kind != _EXPERTS and kind not in _LEAVE_WEIGHTS:
            yield (
                f"{name} has the quantization method {kind}, which changes weights after loading. Start vLLM without "
                "quantization"
            )
        if kind == _EXPERTS:
            backend = getattr(getattr(method, "unquantized_backend", None), "name", "of an unknown name")
            if backend not in _LEAVE_EXPERTS:
                yield (
                    f"{name} has the experts backend {backend}, which repacks weights after loading. Start vLLM with "
                    "moe_backend='triton'"
                )
        # vLLM's fallback to torch is a function of nothing; all others close over a packed copy of the weight.
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            yield (
                f"{name} computes with a packed copy of its weight, as vLLM's linear layers do on CPUs. Load these "
                "weights with vLLM's own reload_weights"
            )
        if derived := [attribute for attribute in _DERIVED_BY_MLA if hasattr(module, attribute)]:
            yield f"{name} has {derived[0]}, which vLLM computes from kv_b_proj when it loads. MLA is not supported yet"
