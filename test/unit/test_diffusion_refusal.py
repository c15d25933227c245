"""Which transformers of SGLang's diffusion engine may be written in place. SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.extras.diffusion.transformer import refusal


class BaseDiT(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        vars(self.layer).update(attributes)

    def post_load_weights(self):
        """Nothing."""


class Fusing(BaseDiT):
    def post_load_weights(self):
        self.fused = self.layer.weight * 2


class Derived(Fusing):
    pass


def method(name: str):
    return type(name, (), {})()


def test_an_unquantized_transformer_is_written_in_place():
    module = BaseDiT(quant_method=method("UnquantizedLinearMethod"))
    module.layerwise_offload_managers = [SimpleNamespace(enabled=False)]
    assert refusal(module) == ""


def test_a_quantized_layer_is_refused_by_name():
    reason = refusal(BaseDiT(quant_method=method("Fp8LinearMethod")))
    assert reason.startswith("layer has the quantization method Fp8LinearMethod")


@pytest.mark.parametrize("kind", [Fusing, Derived])
def test_a_transformer_that_computes_tensors_after_loading_is_refused(kind):
    assert refusal(kind()).startswith("Fusing computes tensors")


def test_offloaded_layers_are_refused():
    module = BaseDiT()
    module.layerwise_offload_managers = [SimpleNamespace(enabled=True)]
    assert "dit_layerwise_offload" in refusal(module)
