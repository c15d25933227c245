"""What counts as a change of a model's live tensors, after which its loader is traced anew."""

import gc
import weakref

import pytest
import torch
from torch import nn

from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.trace.tracer import trace
from tools.oracle.replay import replay
from toy_loader import specs_of


def test_a_second_path_to_a_tensor_changes_nothing():
    model = torch.nn.Linear(3, 2)
    before = LiveSignature(model).current()
    model.kept_too = model.weight.data  # as MLA keeps one from its first forward on
    assert LiveSignature(model).current() == before
    assert LiveSignature(torch.nn.Linear(3, 2)).current() != before


def test_tensors_under_keys_that_read_alike_are_two():
    """A loader fills tables[1] and tables["1"]: neither gets what the other one is sent."""
    model = torch.nn.Module()
    model.tables = {1: torch.zeros(2), "1": torch.zeros(2)}
    model.weight = torch.nn.Parameter(torch.zeros(2))
    into = {"number": model.tables[1], "text": model.tables["1"], "weight": model.weight.data}
    model.load_weights = lambda weights: [into[name].copy_(tensor) for name, tensor in weights]
    sent = {name: torch.full((2,), float(n)) for n, name in enumerate(into, 1)}
    replay(trace(model, specs_of(sent)), sent)
    assert [tensor.tolist() for tensor in into.values()] == [tensor.tolist() for tensor in sent.values()]


# -- LiveSignature: each change is seen, and nothing else leads to a new walk


class Subclass(nn.Parameter):
    """As engines have parameters of their own kinds."""


def model_of_all_kinds():
    model = nn.Module()
    model.first, model.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    model.layers = nn.ModuleList([nn.LayerNorm(4), nn.Identity()])
    model.own = Subclass(torch.zeros(3), requires_grad=False)
    model.register_buffer("table", torch.zeros(4))
    model.register_buffer("absent", None)
    model.kept, model.later, model.number, model.name = torch.zeros(6), None, 3, "model"
    model.several = [torch.zeros(2), 1, torch.zeros(2)]
    model.pair = (torch.zeros(2), "text")
    model.by_name = {"a": torch.zeros(2), "b": 2}
    model.empty, model.hidden = [], {}
    return model


CHANGES = [
    "model.first.weight.data = model.first.weight.data.clone()",
    "model.first.weight.data = model.first.weight.data.t()",
    "model.kept.data = model.kept.data.view(torch.int32)",
    "model.table.untyped_storage().resize_(0)",
    "model.second.weight = nn.Parameter(model.second.weight.detach().clone())",
    "model.first.weight, model.second.weight = model.second.weight, model.first.weight",
    "model.first._parameters = dict(reversed(model.first._parameters.items()))",
    "model.second.bias = model.first.bias; del model.first.bias",
    "del model.own",
    "model.later = torch.zeros(2)",
    "model.kept = None",
    "model.absent = torch.zeros(2)",
    "model.kept = torch.ones(6)",
    "model.renamed = model.kept; del model.kept",
    "model.several[2] = torch.zeros(2)",
    "model.empty.append(torch.zeros(2))",
    "model.pair = (torch.zeros(2), 'text')",
    "model.by_name['b'] = torch.zeros(2)",
    "model.by_name['c'] = model.by_name.pop('a')",
    "model.empty.append(model.several.pop(0))",
    "model.hidden['x'] = torch.zeros(1)",
    "model.layers[0] = nn.LayerNorm(4)",
    "model.layers[1].inner = nn.Linear(1, 1)",
    "model.third = model._modules.pop('second')",
]
NOTHING = [
    "",
    "model.first.weight.data.fill_(2)",
    "model.several[0].add_(1)",
    "model.number, model.name, model.first.training = 4, 'other', False",
    "model.by_name['b'] = 3",
    "model.register_forward_hook(lambda *_: None)",
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change):
    model = model_of_all_kinds()
    remembered = LiveSignature(model)
    before = remembered.current()
    assert before == LiveSignature(model).current()
    exec(change, globals(), {"model": model})
    assert LiveSignature(model).current() != before
    assert remembered.current() == LiveSignature(model).current()


@pytest.mark.parametrize("change", NOTHING)
def test_where_nothing_changed_no_module_is_walked(monkeypatch, change):
    model = model_of_all_kinds()
    remembered = LiveSignature(model)
    before = remembered.current()
    exec(change, globals(), {"model": model})
    monkeypatch.setattr("sglang_reshard.derived.live_signature.live_tensors", None)  # a call would fail
    assert remembered.current() == before


def test_a_change_that_does_not_count_is_looked_at_once(monkeypatch):
    model = model_of_all_kinds()
    remembered = LiveSignature(model)
    before = remembered.current()
    model.later = model.first.weight.data
    assert remembered.current() == before
    monkeypatch.setattr("sglang_reshard.derived.live_signature.live_tensors", None)
    assert remembered.current() == before


def test_a_tensor_that_has_no_address_does_no_harm():
    model = model_of_all_kinds()
    remembered = LiveSignature(model)
    before = remembered.current()
    model.kept = torch.eye(2).to_sparse()
    without = remembered.current()
    assert without == LiveSignature(model).current() != before
    model.kept = torch.zeros(6)
    assert remembered.current() == LiveSignature(model).current() != without


def test_what_the_model_drops_is_not_kept():
    model = model_of_all_kinds()
    remembered = LiveSignature(model)
    remembered.current()
    dropped = [weakref.ref(model.first), weakref.ref(model.first.weight), weakref.ref(model.kept)]
    del model.first, model.kept
    gc.collect()
    assert [reference() for reference in dropped] == [None, None, None]
    assert remembered.current() == LiveSignature(model).current()
