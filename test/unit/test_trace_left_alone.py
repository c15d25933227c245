"""What an update does not write is refused, or is what an engine started on the checkpoint has."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.checkpoint_headers import folder_specs
from sglang_reshard.trace.initial_values import keep_initial_values
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from tools.oracle.replay import replay
from toy_loader import specs_of

SIZE = 4
LARGE = 1 << 17


class Layer(torch.nn.Module):
    """A fused parameter of which no checkpoint has the second half, a scalar, and what layers without a checkpoint do.

    `spare` is a matrix as SGLang's layers allocate them, `zeros` one with a value of its own.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE, SIZE))
        self.fused = torch.nn.Parameter(torch.arange(2.0 * SIZE))
        self.gain = torch.nn.Parameter(torch.ones(SIZE))
        self.zeros = torch.nn.Parameter(torch.zeros(LARGE))
        self.register_buffer("scalar", torch.ones(1))
        self.register_buffer("table", torch.arange(float(SIZE)))
        self.register_buffer("cache", torch.zeros(SIZE), persistent=False)


class Model(torch.nn.Module):
    """Its loader takes weights, half of `fused`, and buffers if it is told to; a checkpoint's names begin otherwise."""

    def __init__(self, buffers=True, strict=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.buffers_too, self.strict = buffers, strict

    def load_weights(self, weights):
        tensors = dict(self.named_parameters())
        if self.buffers_too:
            tensors.update(self.named_buffers())
        for name, tensor in weights:
            name = name.removeprefix("model.")
            if name.endswith("half"):
                tensors[name.removesuffix("half") + "fused"].data[:SIZE].copy_(tensor)
            elif name in tensors:
                tensors[name].data.copy_(tensor)
            elif self.strict:
                raise KeyError(name)


def weights_of(*names, seed=1):
    """A checkpoint with these tensors in each of the two layers."""
    shapes = {
        "weight": (SIZE, SIZE),
        "gain": (SIZE,),
        "zeros": (LARGE,),
        "half": (SIZE,),
        "scalar": (1,),
        "table": (4,),
    }
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{i}.{name}": torch.rand(shapes[name], generator=generator) for i in range(2) for name in names
    }


CHECKPOINT = "weight", "half", "scalar"


def started(weights):
    return lambda: EngineStart(specs_of(weights))


def randomized(model):
    """As SGLang does for load_format="dummy", beneath the hook."""
    with keep_initial_values(model), torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.uniform_(-1e-3, 1e-3)
    return model


def fresh(weights, **options):
    model = Model(**options)
    with torch.no_grad():
        model.load_weights(weights.items())
    return model


def unequal(one, other):
    return [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, other.state_dict()[name])]


def test_an_engine_on_dummy_weights_becomes_one_started_on_the_checkpoint():
    """Halves and whole parameters that no checkpoint has, zeros too large to be copied, buffers of the constructor."""
    model, headers = randomized(Model()), weights_of(*CHECKPOINT)
    for seed in (2, 3):
        weights = weights_of(*CHECKPOINT, seed=seed)
        program = trace(model, specs_of(weights), started(headers))
        for _ in range(2):
            replay(program, weights)
            assert unequal(model, fresh(weights)) == []
    assert program.left_alone == tuple(f"layers.{i}.{name}" for i in range(2) for name in ("fused", "gain", "zeros"))


def test_a_restored_value_is_written_once():
    """It is no weight: what the engine's owner does to it later stays."""
    model, weights = randomized(Model()), weights_of(*CHECKPOINT)
    program = trace(model, specs_of(weights), started(weights))
    replay(program, weights)
    with torch.no_grad():
        model.layers[0].gain.fill_(7)
    replay(program, weights)
    assert model.layers[0].gain.tolist() == [7] * SIZE


def test_without_the_engines_checkpoint_a_parameter_is_refused_with_the_way_out():
    weights = weights_of(*CHECKPOINT)
    with pytest.raises(Unsupported, match=r"layers\.0\.fused is not written completely: 4 of its 8"):
        trace(Model(), specs_of(weights))
    with pytest.raises(Unsupported, match=r"complete checkpoint in the engine's model_path.*\(the folder is empty\)"):
        trace(Model(), specs_of(weights), lambda: EngineStart(None, "the folder is empty"))


def test_what_the_checkpoint_fills_must_be_sent():
    sent = weights_of("weight", "half", "scalar")
    headers = started(weights_of("weight", "half", "scalar", "gain"))
    with pytest.raises(Unsupported, match=r"layers\.0\.gain is not written .*checkpoint fills it from model\.lay"):
        trace(Model(), specs_of(sent), headers)


def test_half_a_checkpoint_proves_nothing():
    sent = weights_of("weight", "half", "gain", "scalar")
    with pytest.raises(Unsupported, match=r"no tensor of the engine's own .* reaches layers\.0\.gain"):
        trace(Model(), specs_of(sent), started(weights_of(*CHECKPOINT)))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_buffer_that_the_loader_fills_must_be_sent(known, strict):
    every = "weight", "half", "gain", "zeros"
    model = Model(strict=strict)
    with torch.no_grad():
        for layer in model.layers:
            layer.fused = torch.nn.Parameter(layer.fused[:SIZE].clone())
    start = started(weights_of(*every, "scalar")) if known else None
    with pytest.raises(Unsupported, match=r"layers\.0\.scalar is a buffer .*state_dict\(\)") as error:
        trace(model, specs_of(weights_of(*every)), start)
    assert "model.layers.0.scalar" in str(error.value) or not known
    # The headers show that no checkpoint has the table; a probe can only tell that the loader would take it.
    sent = specs_of(weights_of(*every, "scalar"))
    if known:
        trace(model, sent, start)
    else:
        with pytest.raises(Unsupported, match=r"layers\.0\.table is a buffer"):
            trace(model, sent, start)


@pytest.mark.parametrize("name", ["layers.?.scalar", "model.layers.?.scalar"])
def test_a_buffer_stays_by_either_of_its_names(name):
    sent, start = specs_of(weights_of("weight", "half")), started(weights_of(*CHECKPOINT))
    program = trace(Model(), sent, start, may_stay=MayStay((name,)))
    assert program.kept == ("layers.0.scalar", "layers.1.scalar")


def test_other_buffers_that_the_checkpoint_fills_are_found_with_it():
    model, headers = Model(), weights_of(*CHECKPOINT)
    for i in range(2):
        headers[f"model.layers.{i}.cache"] = torch.zeros(SIZE)
    with pytest.raises(Unsupported, match=r"layers\.0\.cache is a buffer .* fills from model\.layers\.0\.cache"):
        trace(model, specs_of(weights_of(*CHECKPOINT)), started(headers))


def test_random_values_that_nobody_has_kept_are_refused():
    weights = weights_of(*CHECKPOINT)
    model = Model()
    start = EngineStart(specs_of(weights), randomized=[model])
    with pytest.raises(Unsupported, match=r"layers\.0\.table is a buffer .* overwritten it with random values.*auto"):
        trace(model, specs_of(weights), lambda: start)
    model = Model()
    del model.layers[0]._buffers["table"], model.layers[1]._buffers["table"]
    start = EngineStart(specs_of(weights), randomized=[model])
    with pytest.raises(Unsupported, match=r"layers\.0\.fused is not written .* has overwritten that.*auto"):
        trace(model, specs_of(weights), lambda: start)


def test_a_large_parameter_with_values_of_its_own_is_refused_after_a_dummy_start():
    """Unless it is memory that one of SGLang's layers has allocated for its loader, which has none."""
    weights = weights_of(*CHECKPOINT)
    for quantized in (False, True):
        model = Model()
        with torch.no_grad():
            for layer in model.layers:
                layer.zeros.copy_(torch.arange(LARGE))
                layer.quant_method = object() if quantized else None
        randomized(model)
        if quantized:
            assert "layers.0.zeros" in trace(model, specs_of(weights), started(weights)).left_alone
        else:
            with pytest.raises(Unsupported, match=r"layers\.0\.zeros is not written by the loader"):
                trace(model, specs_of(weights), started(weights))


def test_garbage_of_a_constructor_is_not_given_back():
    """Memory that was never written may be anything, and a NaN in a bias would spoil what a random value does not."""
    model, weights = Model(), weights_of(*CHECKPOINT)
    with torch.no_grad():
        model.layers[0].gain[1] = float("nan")
    replay(trace(randomized(model), specs_of(weights), started(weights)), weights)
    assert model.layers[0].gain.isfinite().all()
    assert model.layers[1].gain.tolist() == [1] * SIZE


def test_what_the_loader_changes_in_place_is_not_left_alone():
    """Every update would change it once more."""

    class Doubling(Model):
        def load_weights(self, weights):
            super().load_weights(weights)
            self.layers[1].gain.data.mul_(2)

    weights = weights_of(*CHECKPOINT)
    with pytest.raises(Unsupported, match=r"layers\.1\.gain is not written by the loader at all"):
        trace(Doubling(), specs_of(weights), started(weights))


def test_a_layer_that_is_wrapped_later_gets_its_initial_value():
    """As SGLang wraps layers that LoRA adapters are for."""

    class Wrapped(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

    model, weights = randomized(Model()), weights_of(*CHECKPOINT)
    layer = model.layers[1]
    model.layers[1] = Wrapped(layer)
    model.load_weights = lambda tensors: Model.load_weights(
        model, ((name.replace("layers.1.", "layers.1.base_layer."), tensor) for name, tensor in tensors)
    )
    replay(trace(model, specs_of(weights), started(weights)), weights)
    assert layer.gain.tolist() == [1] * SIZE
    assert layer.fused[SIZE:].tolist() == [4, 5, 6, 7]


def test_a_layer_that_is_called_as_a_wrapper_keeps_its_own_initial_value():
    """The module around it has a parameter of the same name, shape and place in the checkpoint's names."""

    class Around(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer, self.gain = layer, torch.nn.Parameter(torch.full((SIZE,), 3.0))

    model, weights = Model(), weights_of(*CHECKPOINT)
    model.layers[1] = around = Around(model.layers[1])
    model.load_weights = lambda tensors: Model.load_weights(
        model, ((name.replace("layers.1.", "layers.1.base_layer."), tensor) for name, tensor in tensors)
    )
    replay(trace(randomized(model), specs_of(weights), started(weights)), weights)
    assert around.base_layer.gain.tolist() == [1] * SIZE
    assert around.gain.tolist() == [3] * SIZE


def test_a_number_in_a_buffers_name_is_no_layers():
    """The loader knows the second scale, and has never heard of the first one."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(SIZE))
            self.register_buffer("scale1", torch.ones(SIZE))
            self.register_buffer("scale2", torch.ones(SIZE))

        def load_weights(self, weights):
            for name, tensor in weights:
                {"weight": self.weight.data, "scale2": self.scale2}[name].copy_(tensor)

    with pytest.raises(Unsupported, match="scale2 is a buffer that the loader fills from scale2"):
        trace(Scaled(), specs_of({"weight": torch.zeros(SIZE)}))


def test_the_checkpoint_is_asked_for_only_if_something_is_not_written():
    asked = []
    sent = specs_of(weights_of("weight", "half", "gain", "zeros", "scalar", "table"))
    model = Model()
    for layer in model.layers:
        layer.fused = torch.nn.Parameter(layer.fused[:SIZE].clone())
    trace(model, sent, lambda: asked.append(1) or EngineStart(None))
    assert asked == []


def test_headers_are_those_of_the_files_that_the_index_lists(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    assert [(s.name, s.shape, s.dtype) for s in folder_specs(tmp_path)] == [
        ("a", (2, 3), "float32"),
        ("b", (2,), "bfloat16"),
    ]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert [s.name for s in folder_specs(tmp_path)] == ["a"]
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "three.safetensors"}}))
    with pytest.raises(Mismatch, match=r"three\.safetensors, which its"):
        folder_specs(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "one.safetensors"}}))
    with pytest.raises(Mismatch, match="has no tensor c"):
        folder_specs(tmp_path)
    with pytest.raises(Mismatch, match="has no safetensors"):
        folder_specs(tmp_path / "nowhere")
    index.unlink()
    one = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "one.safetensors").write_bytes(one[:-4])
    with pytest.raises(Mismatch, match=r"one\.safetensors is not a complete safetensors file"):
        folder_specs(tmp_path)
