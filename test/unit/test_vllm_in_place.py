"""Which loaded vLLM models may be written in place. vLLM is not needed: classes are known by their names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.extras.vllm.worker import refusal


def named(name: str, **attributes):
    return type(name, (SimpleNamespace,), {})(**attributes)


def packed(weight):
    return lambda x: x @ weight


def model(**attributes) -> torch.nn.Module:
    """A model of one layer with these attributes, which vLLM's own layers have."""
    layer = torch.nn.Linear(2, 2)
    vars(layer).update(attributes)
    return torch.nn.ModuleDict({"layer": layer})


def experts(backend: str):
    return named("UnquantizedFusedMoEMethod", unquantized_backend=SimpleNamespace(name=backend))


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"quant_method": None},
        {"quant_method": named("UnquantizedLinearMethod"), "cpu_linear": torch.nn.functional.linear},
        {"quant_method": named("UnquantizedEmbeddingMethod"), "cpu_linear": lambda x: x},
        {"quant_method": experts("TRITON")},
    ],
)
def test_layers_that_keep_the_loaders_layout_are_written_in_place(attributes):
    assert refusal(model(**attributes)) == ""


@pytest.mark.parametrize(
    ("attributes", "named_in_error"),
    [
        ({"quant_method": named("Fp8LinearMethod")}, "Fp8LinearMethod"),
        ({"quant_method": experts("FLASHINFER_CUTLASS")}, "FLASHINFER_CUTLASS"),
        ({"quant_method": named("UnquantizedFusedMoEMethod")}, "of an unknown name"),
        ({"cpu_linear": packed(torch.zeros(2, 2))}, "packed copy"),
        ({"W_UV": torch.zeros(2)}, "W_UV"),
    ],
)
def test_layers_that_vllm_changes_after_loading_are_refused_by_name(attributes, named_in_error):
    reason = refusal(model(**attributes))
    assert reason.startswith("layer has " if "cpu_linear" not in attributes else "layer computes with ")
    assert named_in_error in reason
