"""An update leaves nothing that a forward pass has derived from the weights before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from sglang_reshard.derived import DerivedState
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.folded import remember_built
from sglang_reshard.trace.live_shards import live_shards
from sglang_reshard.trace.tracer import trace
from support import derived_patterns, deriving
from tools.oracle.replay import replay
from toy_loader import specs_of

X = torch.arange(2.0 * deriving.SIZE).reshape(2, deriving.SIZE)


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [("weight", torch.randn(deriving.SIZE, deriving.SIZE, generator=generator).bfloat16())]


def update(layer: nn.Module, given: list[tuple[str, torch.Tensor]], derived: DerivedState) -> None:
    replay(trace(layer, specs_of(dict(given))), dict(given), derived)


def of_fresh(kind: type[nn.Module], seed: int) -> torch.Tensor:
    """What a layer says that was built on these weights. Those that keep state in globals have none then."""
    layer = kind()
    layer.load_weights(weights(seed))
    return layer(X)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[type[nn.Module]]:
    """A class of layers, or one that keeps a copy of its weight in the place of this name."""
    with contextlib.ExitStack() as stack:
        place = request.param
        yield stack.enter_context(derived_patterns.layer(place, "copy")) if isinstance(place, str) else place


@pytest.mark.parametrize("kind", ["attribute", "buffer", deriving.ByMethod], indirect=True)
def test_what_cuda_graphs_read_is_computed_again_where_it_is(kind):
    layer = kind()
    layer.load_weights(weights(0))
    derived = DerivedState(layer, addresses_stay=True)
    layer(X)
    (name,) = {k for k, v in {**vars(layer), **layer._buffers}.items() if isinstance(v, torch.Tensor)}
    kept = getattr(layer, name)
    derived.signature()
    assert getattr(layer, name) is kept
    update(layer, weights(1), derived)
    assert getattr(layer, name) is kept
    assert torch.equal(layer(X), of_fresh(kind, 1))


@pytest.mark.parametrize("kind", [deriving.OfInputs, "dictionary", deriving.Folded], indirect=True)
def test_what_cuda_graphs_read_and_no_method_computes_again_is_refused(kind):
    layer = kind()
    layer.load_weights(weights(0))
    derived = DerivedState(layer, addresses_stay=True)
    layer(X)
    before = layer.weight.clone(), layer(X)
    with pytest.raises(Unsupported, match=r"(_scaled|_d\.c|set folded).*disable_cuda_graph=True"):
        derived.signature()
    assert torch.equal(layer.weight, before[0])  # a rehearsal changes nothing
    assert torch.equal(layer(X), before[1])


@pytest.mark.parametrize("kind", [deriving.FoldedByLoader, deriving.FoldedByParameterLoader])
@pytest.mark.parametrize("dummy", [False, True], ids=["loaded", "dummy"])
@pytest.mark.parametrize("addresses_stay", [False, True])
def test_what_loading_does_once_it_does_again_on_new_weights(kind, dummy, addresses_stay):
    """A loader changes what it has loaded in place, and sets a flag. After a dummy start the first update is first."""
    layer = kind()
    remember_built(layer)
    if not dummy:
        layer.load_weights(weights(0))
    derived = DerivedState(layer, addresses_stay)
    for seed in (1, 2, 3):
        derived.signature()
        update(layer, weights(seed), derived)
        fresh = kind()
        fresh.load_weights(weights(seed))
        assert torch.equal(layer(X), fresh(X))


def test_weights_that_were_changed_after_they_were_loaded_are_not_passed_on():
    layer = deriving.FoldedByLoader()
    program = trace(layer, specs_of(dict(weights(0))))
    with pytest.raises(Unsupported, match="weight cannot be read from the live weights"):
        live_shards(program, {"weight": (deriving.SIZE, deriving.SIZE)}, 0)


def test_memory_that_no_weight_is_in_keeps_its_address_for_cuda_graphs():
    layer = deriving.OfNoWeight()
    derived = DerivedState(layer, addresses_stay=True)
    layer(X)
    kept = layer._workspace
    derived.signature()
    derived.renew(model_ran=True)
    assert layer._workspace is kept
    assert derived.remark == ""


def test_what_the_engine_has_set_is_refused_by_name():
    layer = nn.Sequential(deriving.FromOutside())
    derived = DerivedState(layer)
    layer[0].copy = layer[0].weight.float()
    with pytest.raises(Unsupported, match=r"0\.copy was computed after the engine had loaded its weights"):
        derived.signature()
    assert layer[0].copy is not None


@pytest.mark.parametrize("loaded", [False, True])
def test_a_tensor_that_replaces_a_parameter_is_left(loaded):
    """The head of a draft, which SGLang replaces after loading by rows of its target's. A method binds weights."""
    layer = nn.Sequential(deriving.Tied())
    if loaded:
        layer.register_buffer("head", torch.ones(2, deriving.SIZE), persistent=False)
    derived = DerivedState(layer)
    del layer[0].weight
    layer[0].weight = layer.head if loaded else torch.ones(2, deriving.SIZE)
    derived.signature()
    assert torch.equal(layer[0].weight, torch.ones(2, deriving.SIZE))
    assert ("0.weight" in derived.remark) == (not loaded)


@pytest.mark.parametrize("kind", ["attribute"], indirect=True)
def test_what_sglang_loads_itself_leaves_no_state_of_the_weights_before(kind):
    layer = kind()
    layer.load_weights(weights(0))
    executor = UpdateExecutor(TracedModel(layer), 0, torch.device("cpu"))
    layer(X)
    layer.load_weights(weights(1))
    executor.written_by_others()
    assert torch.equal(layer(X), of_fresh(kind, 1))


class _Lazy(Mapping[str, nn.Module]):
    """Makes what it is asked for, as vLLM's registries of activations do."""

    def __iter__(self) -> Iterator[str]:
        return iter(["gelu"])

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> nn.Module:
        raise AssertionError("was asked to make an activation")


def test_what_makes_its_values_when_it_is_read_is_not_read():
    model = nn.Linear(2, 2)
    model.activations = _Lazy()
    DerivedState(model)
