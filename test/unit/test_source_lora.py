"""A PEFT model's tensors by their checkpoint names, and configurations that SGLang would serve otherwise than PEFT."""

import json

import pytest
import torch
from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources import FlatBuffer, FlatMember, adapter_config, adapter_tensors, base_tensors, lora

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": {"up", "down"}, "bias": "none"}


class Adapted(nn.Module):
    """Named as PEFT names it, with two adapters on one of two projections."""

    def __init__(self):
        super().__init__()
        base = self.base_model = nn.Module()
        layer = base.model = nn.Module()
        layer.up, layer.down = nn.Module(), nn.Linear(3, 2, bias=False)
        layer.up.base_layer = nn.Linear(2, 3)
        for matrix, shape in (("lora_A", (4, 2)), ("lora_B", (3, 4))):
            adapters = nn.ModuleDict({name: nn.Linear(*shape[::-1], bias=False) for name in ("default", "other")})
            setattr(layer.up, matrix, adapters)


def test_adapter_and_base_have_their_checkpoint_names():
    model = Adapted()
    up = model.base_model.model.up
    adapter = dict(adapter_tensors(model))
    assert {name: id(t) for name, t in adapter.items()} == {
        "base_model.model.up.lora_A.weight": id(up.lora_A["default"].weight),
        "base_model.model.up.lora_B.weight": id(up.lora_B["default"].weight),
    }
    other = dict(adapter_tensors(model, "other"))
    assert other.keys() == adapter.keys()
    assert other["base_model.model.up.lora_A.weight"] is up.lora_A["other"].weight
    assert sorted(name for name, _ in base_tensors(model)) == ["down.weight", "up.bias", "up.weight"]
    with pytest.raises(Mismatch, match="no LoRA adapter 'third'"):
        adapter_tensors(model, "third")


def test_of_a_flat_buffer_only_what_is_meant_is_a_member(monkeypatch):
    members = (
        FlatMember("base_model.model.up.base_layer.weight", (3, 2), 0),
        FlatMember("base_model.model.up.lora_A.default.weight", (4, 2), 6),
    )
    buffer, piece = FlatBuffer(members, ((0, 0, 14),)), torch.zeros(14)
    alone = FlatBuffer(members[:1], ((0, 0, 6),))
    monkeypatch.setattr(lora, "named_shards", lambda module: [("flat", piece, buffer), ("rest", piece[:6], alone)])
    ((name, given, meant),) = adapter_tensors(nn.Module())
    assert (name, meant.ranges) == ("flat", buffer.ranges)
    assert given is piece
    assert meant.members == (FlatMember("base_model.model.up.lora_A.weight", (4, 2), 6),)
    assert adapter_tensors(nn.Module())[0][2] is meant, "the same object says that nothing has changed"
    assert [row[2].members[0].name for row in base_tensors(nn.Module())] == ["up.weight", "up.weight"]


def test_the_configuration_is_what_sglang_computes_with():
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down", "up"]}
    assert json.loads(adapter_config(PLAIN)) == expected
    assert json.loads(adapter_config({"default": PLAIN})) == expected
    assert json.loads(adapter_config(PLAIN | {"target_modules": "all-linear"}))["target_modules"] == "all-linear"


@pytest.mark.parametrize("rank", [1, 2, 4, 6, 64, 100])
@pytest.mark.parametrize("alpha", [1, 8, 12.5, 32])
def test_of_rslora_sglangs_scaling_is_pefts(rank, alpha):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, use_rslora=True, target_modules=["up"])
    model = peft.get_peft_model(nn.ModuleDict({"up": nn.Linear(2, 3)}), config)
    given = json.loads(adapter_config(model))
    # As SGLang's LoRAAdapter computes it; its batches then have it in float32.
    scaling = torch.tensor(given["lora_alpha"] / given["r"], dtype=torch.float32)
    assert scaling == torch.tensor(model.base_model.model["up"].scaling["default"], dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "use_dora=True: SGLang does not serve DoRA"),
        ({"rank_pattern": {"up": 8}}, "ranks that differ"),
        ({"modules_to_save": ["head"]}, "whole modules"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_modules": ".*up"}, "is a pattern"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
    ],
)
def test_what_sglang_would_ignore_is_refused(options, said):
    with pytest.raises(Unsupported, match=said.replace("(", r"\(").replace(".*", r"\.\*")):
        adapter_config(PLAIN | options)


def test_an_incomplete_configuration_is_refused_by_name():
    with pytest.raises(Mismatch, match="lacks lora_alpha, target_modules"):
        adapter_config({"r": 4})
