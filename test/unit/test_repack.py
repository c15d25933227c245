"""Modules that were repacked after loading: their own post-processing runs again on what arrives."""

import pytest
import torch

from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.errors import Unsupported
from sglang_reshard.landings.base import Landing
from sglang_reshard.trace.block_formats import quantize_blocks
from sglang_reshard.trace.built_modules import note_copies, remember
from sglang_reshard.trace.tracer import trace
from support.toy_repacking import (
    BlockLinear,
    Method,
    Repacking,
    live_tensors,
    process,
    started,
    weights,
)
from tools.oracle.replay import replay
from toy_loader import Toy, specs_of

LAYERS, ROWS, CPU = 3, 12, torch.device("cpu")


def differing(model, other):
    one, two = live_tensors(model), live_tensors(other)
    assert one.keys() == two.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, two[name])]


def test_an_update_leaves_what_a_start_leaves_and_keeps_addresses():
    model = started(Repacking(LAYERS, ROWS), weights(1, LAYERS, ROWS))
    before, signature = dict(live_tensors(model)), LiveSignature(model).current()
    for version in (2, 3):
        given = weights(version, LAYERS, ROWS)
        replay(trace(model, specs_of(given)), given)
        assert differing(model, started(Repacking(LAYERS, ROWS), given)) == []
    assert LiveSignature(model).current() == signature
    assert all(live_tensors(model)[name] is t for name, t in before.items() if not name.endswith("largest"))


class Copying:
    """Leaves the parameters as they are, and keeps the weight in float32, too."""

    def process_weights_after_loading(self, layer):
        layer.register_buffer("wide", layer.weight.data.float() * 2, persistent=False)


def test_a_copy_that_post_processing_keeps_is_computed_again():
    def engine(version):
        model = Repacking(LAYERS, ROWS, method=Copying)
        model.load_weights(weights(version, LAYERS, ROWS).items())
        for layer in model.layers:
            process(layer)
        note_copies(model)
        return model

    model = engine(1)
    before = [layer.wide for layer in model.layers]
    given = weights(2, LAYERS, ROWS) | {f"layers.{n}.steps": torch.ones(3) for n in range(LAYERS)}
    replay(trace(model, specs_of(given)), given)
    for layer, wide, expected in zip(model.layers, before, engine(2).layers, strict=True):
        assert layer.wide is wide
        assert torch.equal(wide, expected.wide)
        assert torch.equal(layer.weight, expected.weight)


def test_the_live_module_is_not_touched_before_its_results_are_there():
    """A staged update repacks while the engine generates."""
    model = started(Repacking(1, ROWS), weights(1, 1, ROWS))
    (layer,) = model.layers
    attributes, method = dict(vars(layer)), dict(vars(layer.quant_method))
    given = weights(2, 1, ROWS)
    program = trace(model, specs_of(given))
    seen = []
    layer.quant_method.processed = seen
    landing = Landing(program).converting(CPU, 0)
    landing.place([program.arrivals], ())
    landing.arrived(0)
    assert vars(layer) == attributes
    assert vars(layer.quant_method).keys() == method.keys()
    assert seen == [], "by the live method"


def test_a_parameter_that_nothing_brings_must_not_matter():
    """`steps` is made anew after loading, and missing in every checkpoint; `bound` is a scale that was forgotten."""
    model = started(Repacking(1, ROWS), weights(1, 1, ROWS))
    given = {name: tensor for name, tensor in weights(2, 1, ROWS).items() if "bound" not in name}
    with pytest.raises(Unsupported, match=r"layers\.0\.bound is not written by the loader at all.* needs its scale"):
        trace(model, specs_of(given))


def test_what_was_changed_since_is_refused():
    model = started(Repacking(1, ROWS), weights(1, 1, ROWS))
    model.layers[0].scale = torch.nn.Parameter(torch.zeros(ROWS, 2), requires_grad=False)
    with pytest.raises(Unsupported, match=r"layers\.0\.scale is \(12, 2\) .*, but repacking makes \(12, 1\)"):
        trace(model, specs_of(weights(2, 1, ROWS)))
    model.layers[0].cached = torch.zeros(5)
    del model.layers[0].scale
    with pytest.raises(Unsupported, match=r"layers\.0\.cached is .* but repacking makes nothing"):
        trace(model, specs_of(weights(2, 1, ROWS)))


class Experts(torch.nn.Module):
    """A scale for two halves of each expert, which the checkpoint has twice; one value for all experts is kept."""

    def __init__(self):
        super().__init__()
        self.quant_method = ExpertsMethod()
        self.scale = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        remember(self, process, lambda _: False)

    def load(self, name, tensor):
        _, expert, _ = name.split(".")
        self.scale.data[int(expert)] = tensor


class ExpertsMethod:
    def process_weights_after_loading(self, layer):
        layer.largest = torch.nn.Parameter(layer.scale.data.max().expand(3), requires_grad=False)
        layer.alphas = torch.nn.Parameter(layer.scale.data[:, 0] * 2, requires_grad=False)


def experts(version):
    generator = torch.Generator().manual_seed(version)
    given = {
        f"experts.{e}.{half}": torch.rand(shape, generator=generator)
        for e, shape in ((0, ()), (1, (1,)), (2, ()))
        for half in ("gate", "up")
    }
    toy = Toy(lambda toy, weights: [toy.experts.load(name, tensor) for name, tensor in weights])
    toy.experts = Experts()
    toy.load_weights(given.items())
    process(toy.experts)
    return toy, given


def test_of_a_scale_that_fills_the_same_elements_twice_the_last_is_kept():
    """NVFP4 experts: the scale of activations of gate_proj is written to the place of up_proj's, too."""
    model, _ = experts(1)
    expected, given = experts(2)
    replay(trace(model, specs_of(given)), given)
    assert torch.equal(model.experts.scale, expected.experts.scale)
    assert torch.equal(model.experts.alphas, expected.experts.alphas)


def test_one_element_in_several_places_is_written_once():
    """torch copies nothing to an expanded tensor. SGLang keeps such a scale for NVFP4 experts of flashinfer-trtllm."""
    model, _ = experts(1)
    expected, given = experts(2)
    kept = model.experts.largest
    replay(trace(model, specs_of(given)), given)
    assert model.experts.largest is kept
    assert kept.stride() == (0,)
    assert torch.equal(kept, expected.experts.largest)
    model.experts.alphas = torch.nn.Parameter(torch.zeros(()).expand(3), requires_grad=False)
    with pytest.raises(Unsupported, match=r"experts\.alphas has one element in several places, but repacking makes"):
        trace(model, specs_of(given))


class OnceMethod(Method):
    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        if OnceMethod.done:
            raise RuntimeError("no kernel")


def test_what_cannot_run_again_is_refused_before_anything_is_written():
    OnceMethod.done = False
    model = started(Repacking(1, ROWS, method=OnceMethod), weights(1, 1, ROWS))
    OnceMethod.done = True
    with pytest.raises(Unsupported, match=r"layers\.0 is repacked after loading by OnceMethod, .*: no kernel"):
        trace(model, specs_of(weights(2, 1, ROWS)))
    assert differing(model, model) == []


def test_a_loader_that_fails_leaves_the_modules_as_they_were():
    model = started(Repacking(1, ROWS), weights(1, 1, ROWS))
    before = dict(vars(model.layers[0]))
    given = weights(2, 1, ROWS) | {"layers.0.weight": torch.zeros(5, 5)}
    with pytest.raises(Exception, match="rejected"):
        trace(model, specs_of(given))
    assert vars(model.layers[0]) == before


def test_blocks_that_are_quantized_on_arrival_are_repacked_next():
    """As on Blackwell, whose scales are requantized for DeepGEMM."""
    sizes = [(8, 6), (5, 9), (8, 6)]

    def load(toy, weights):
        named = dict(toy.named_parameters())
        for name, tensor in weights:
            named[name].data.copy_(tensor)

    toy = Toy(load)
    toy.layers = torch.nn.ModuleList(BlockLinear(*size) for size in sizes)
    for layer in toy.layers:
        process(layer)
    generator = torch.Generator().manual_seed(1)
    given = {f"layers.{n}.weight": torch.randn(s, generator=generator).bfloat16() for n, s in enumerate(sizes)}
    program = trace(toy, specs_of(given))
    replay(program, given)
    for layer, weight in zip(toy.layers, given.values(), strict=True):
        quantized, scales = quantize_blocks(weight[None], (4, 4))
        assert torch.equal(layer.weight.view(torch.uint8), quantized[0].t().contiguous().view(torch.uint8))
        assert torch.equal(layer.weight_scale_inv, scales[0].t())
