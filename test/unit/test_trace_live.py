"""What counts as a change of a model's live tensors, after which its loader is traced anew."""

import torch

from sglang_reshard.trace import live_signature


def test_the_signature_follows_tensors():
    model = torch.nn.Linear(3, 2)
    before = live_signature(model)
    model.weight.data = model.weight.data.clone()
    moved = live_signature(model)
    assert moved != before
    model.scale = torch.zeros(2)
    assert live_signature(model) != moved


def test_a_second_path_to_a_tensor_changes_nothing():
    model = torch.nn.Linear(3, 2)
    before = live_signature(model)
    model.kept_too = model.weight.data  # as MLA keeps one from its first forward on
    assert live_signature(model) == before
    assert live_signature(torch.nn.Linear(3, 2)) != before
