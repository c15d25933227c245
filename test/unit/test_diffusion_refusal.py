"""Which transformers of SGLang's diffusion engine may be written in place. SGLang is not needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.extras.diffusion.receiver import refusal


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


@pytest.mark.parametrize(
    ("module", "offloads", "says"),
    [
        (BaseDiT(quant_method=method("UnquantizedLinearMethod")), False, ""),
        (BaseDiT(quant_method=method("Fp8LinearMethod")), False, "layer has the quantization method Fp8LinearMethod"),
        (Fusing(), False, "Fusing computes tensors"),
        (Derived(), False, "Fusing computes tensors"),
        (BaseDiT(), True, "dit_layerwise_offload"),
    ],
)
def test_a_transformer_that_cannot_be_written_in_place_is_refused_by_name(module, offloads, says):
    module.layerwise_offload_managers = [SimpleNamespace(enabled=offloads)]
    assert says in refusal(module)
    assert bool(says) == bool(refusal(module))
