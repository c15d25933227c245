"""An adapter gets zeros for the experts' matrices that it does not have, in the sizes of a checkpoint."""

from types import SimpleNamespace

import torch

from sglang_reshard.patches import lora_missing_experts

RANK, HIDDEN, INNER, TP = 2, 6, 4, 2  # INNER is an engine rank's part of an expert's width


def manager(layers):
    a = {"gate_up_proj_moe": torch.empty(3, 5, 2 * 8, HIDDEN), "down_proj_moe": torch.empty(3, 5, 8, INNER)}
    b = {"gate_up_proj_moe": torch.empty(3, 5, 2 * INNER, 8), "down_proj_moe": torch.empty(3, 5, HIDDEN, 8)}
    pool = SimpleNamespace(
        A_buffer={name: [t] * layers for name, t in a.items()}, B_buffer={name: [t] * layers for name, t in b.items()}
    )
    return SimpleNamespace(memory_pool=pool)


def zeros_for(monkeypatch, names, layers=(1,)):
    experts = [(n, f"model.layers.{n}.mlp.experts", SimpleNamespace(tp_size=TP)) for n in layers]
    monkeypatch.setattr(lora_missing_experts, "_layers_of_experts", lambda manager: experts)
    found = lora_missing_experts.zeros(manager(max(layers) + 1), dict.fromkeys(names, torch.ones(1)), RANK)
    assert not any(tensor.any() for tensor in found.values())
    return {name.removeprefix("base_model.model.model.layers."): tuple(t.shape) for name, t in found.items()}


GATE_UP = {
    "1.mlp.experts.0.gate_up_proj.lora_A.weight": (RANK, HIDDEN),
    "1.mlp.experts.0.gate_up_proj.lora_B.weight": (2 * INNER * TP, RANK),
}
DOWN = {
    "1.mlp.experts.0.down_proj.lora_A.weight": (RANK, INNER * TP),
    "1.mlp.experts.0.down_proj.lora_B.weight": (HIDDEN, RANK),
}


def test_what_an_adapter_lacks_is_zero(monkeypatch):
    prefix = "base_model.model.model.layers."
    attention = f"{prefix}1.self_attn.q_proj.lora_A.weight"
    assert zeros_for(monkeypatch, [attention]) == GATE_UP | DOWN
    assert zeros_for(monkeypatch, [f"{prefix}1.mlp.experts.3.down_proj.lora_A.weight"]) == GATE_UP
    assert zeros_for(monkeypatch, [f"{prefix}1.mlp.experts.3.gate_proj.lora_A.weight"]) == DOWN
    # An adapter's file may call the model otherwise, and its experts' projections by Mixtral's names.
    assert zeros_for(monkeypatch, [f"layers.1.mlp.experts.3.{w}.lora_A.weight" for w in ("w1", "w2")]) == {}


def test_layers_are_told_apart_and_shared_experts_from_routed_ones(monkeypatch):
    names = [f"model.layers.11.mlp.experts.0.{p}.lora_A.weight" for p in ("gate_up_proj", "down_proj")]
    assert zeros_for(monkeypatch, names, layers=(1, 11)) == GATE_UP | DOWN
    shared = "model.layers.1.mlp.shared_experts.down_proj.lora_A.weight"
    assert zeros_for(monkeypatch, [shared]) == GATE_UP | DOWN


def test_a_model_without_experts_gets_nothing(monkeypatch):
    monkeypatch.setattr(lora_missing_experts, "_layers_of_experts", lambda manager: [])
    assert lora_missing_experts.zeros(None, {"model.layers.0.mlp.down_proj.lora_A.weight": torch.ones(1)}, RANK) == {}
