"""PEFT's adapters of stacked experts: of each expert, lora_B @ lora_A is what PEFT adds to its weight."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import FlatBuffer, FlatMember, adapter_config, adapter_tensors, base_tensors, lora

EXPERTS, OUTPUTS, INPUTS, RANK = 3, 10, 4, 2
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Experts(nn.Module):
    is_transposed, is_concatenated = False, True

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, OUTPUTS, INPUTS))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INPUTS, OUTPUTS // 2))


class Model(nn.Module):
    def __init__(self, experts=Experts):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = experts()
        self.mlp.router = nn.Linear(INPUTS, EXPERTS)


def adapted(parameters, experts=Experts, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=RANK, lora_alpha=8, target_parameters=parameters, target_modules=[], init_lora_weights=False, **options
    )
    return peft.get_peft_model(Model(experts), config)


def test_base_weights_keep_their_names_under_several_wrappers():
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.router.bias", "mlp.router.weight"]
    assert sorted(name for name, _ in base_tensors(adapted(BOTH))) == names


def test_a_configuration_with_other_parameters_is_refused():
    options = {"r": 4, "lora_alpha": 8, "target_modules": None}
    assert json.loads(adapter_config(options | {"target_parameters": BOTH[1:]}))["target_modules"] == ["down_proj"]
    with pytest.raises(
        Unsupported, match=r"target_parameters with 'router\.weight': of parameters that are no module's"
    ):
        adapter_config(options | {"target_parameters": [*BOTH, "router.weight"]})


class Transposed(Experts):
    is_transposed = True


class Unknown(Experts):
    is_concatenated = None


@pytest.mark.parametrize("experts", [Transposed, Unknown])
def test_experts_in_another_layout_are_refused(experts):
    with pytest.raises(Unsupported, match=rf"mlp\.experts\.(gate_up|down)_proj: .* and {experts.__name__} does not"):
        adapter_tensors(adapted(BOTH, experts))


def test_other_parameters_are_refused():
    with pytest.raises(Unsupported, match=r"the adapter of base_model\.model\.mlp\.router\.weight: of parameters"):
        adapter_tensors(adapted(["router.weight"]))


def test_a_flat_parameter_of_experts_is_refused(monkeypatch):
    name = "base_model.model.mlp.experts.lora_A.default.weight"
    buffer = FlatBuffer((FlatMember(name, (EXPERTS * RANK, INPUTS), 0),), ((0, 0, EXPERTS * RANK * INPUTS),))
    piece = torch.zeros(EXPERTS * RANK * INPUTS)
    monkeypatch.setattr(lora, "named_shards", lambda module: [("flat", piece, buffer)])
    wrapper = SimpleNamespace(parameter="down_proj")
    monkeypatch.setattr(lora, "stacked_experts", lambda module: {"base_model.model.mlp.experts": wrapper})
    with pytest.raises(Unsupported, match=r"mlp\.experts\.lora_A\.weight is of stacked experts in a flat parameter"):
        adapter_tensors(nn.Module())
