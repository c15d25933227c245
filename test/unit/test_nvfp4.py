"""NVFP4: an engine rank of bf16 weights keeps what ModelOpt makes of them with the scale that the trainer sends."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.landings.base import Landing
from sglang_reshard.trace.block_formats import FP8, NVFP4, quantize_nvfp4
from sglang_reshard.trace.block_fp8 import _Quantizer
from sglang_reshard.trace.built_modules import remember
from sglang_reshard.trace.tracer import trace
from support import nvfp4
from support.sweep import examples
from support.toy_repacking import process
from toy_loader import Toy, contents, random, specs_of

ROWS, COLUMNS = 12, 128


def patterns(seed, dtype):
    """Weights with zeros, values in the middle of two codes, and rows that are tiny beside the others."""
    weights = random(16, 64, dtype=torch.float32, seed=seed)
    weights[0, :20] = 0
    weights[1] = (weights[1] * 8).round() / 4
    weights[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 8) * (-1) ** torch.arange(64)
    weights[3] *= 2.0**-30
    return weights.to(dtype)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 999), st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([1.0, 0.3, 1 / 64, 40.0]))
def test_it_quantizes_by_definition(seed, dtype, factor):
    weights = torch.stack([patterns(seed + n, dtype) for n in range(2)])
    whole = torch.stack([nvfp4.whole_scale(weight) * factor for weight in weights])
    whole[1] = 1 / 448  # codes are the weights of the third row themselves
    packed, scales = quantize_nvfp4(weights, whole)
    assert (packed.dtype, scales.dtype) == (torch.uint8, FP8)
    for n, weight in enumerate(weights):
        right, of_groups = nvfp4.quantized(weight, whole[n])
        assert torch.equal(packed[n], right)
        assert torch.equal(scales[n].view(torch.uint8), of_groups.view(torch.uint8))


class ModelOptFp4LinearMethod:
    """Keeps the largest scale of the fused weights, and the scales of groups in another order."""

    quant_config = SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)

    def process_weights_after_loading(self, layer):
        layer.alpha = torch.nn.Parameter(layer.input_scale.max() * layer.weight_scale_2.max(), requires_grad=False)
        swizzled = layer.weight_scale.data.view(torch.uint8).flip(1).view(FP8)
        layer.weight_scale = torch.nn.Parameter(swizzled, requires_grad=False)


class Linear(torch.nn.Module):
    """Two weights, one beneath the other, as SGLang's linear layers keep them in NVFP4."""

    def __init__(self, rows, columns, method):
        super().__init__()
        self.quant_method = method()
        shapes = {
            "weight": torch.empty(2 * rows, columns // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(2 * rows, columns // 16, dtype=FP8),
            "weight_scale_2": torch.empty(2),
            "input_scale": torch.empty(2),
        }
        for name, tensor in shapes.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        remember(self, process, lambda _: False)


def load(toy, weights):
    """Loads the second half of the rows and columns of mlp.gate.weight and mlp.up.weight."""
    for name, tensor in weights:
        _, shard, own = name.split(".")
        parameter = getattr(toy.mlp.gate_up, own)
        part = ["gate", "up"].index(shard)
        if tensor.dim() == 0:
            parameter.data[part] = tensor
            continue
        mine = tensor.chunk(2)[1].chunk(2, 1)[1]
        rows = parameter.shape[0] // 2
        assert mine.shape[1] == parameter.shape[1]
        parameter.data[part * rows :][:rows].copy_(mine)


def engine(method=ModelOptFp4LinearMethod):
    toy = Toy(load)
    toy.mlp = torch.nn.Module()
    toy.mlp.gate_up = Linear(ROWS // 2, COLUMNS // 2, method)
    return toy


def started(given):
    toy = engine()
    toy.load_weights(given.items())
    process(toy.mlp.gate_up)
    return toy


def sent(seed):
    """What a trainer sends: one scale of both weights, and one of their activations."""
    found = {f"mlp.{shard}.weight": random(ROWS, COLUMNS, seed=seed + n) for n, shard in enumerate(("gate", "up"))}
    whole = nvfp4.whole_scale(*found.values())
    for name in list(found):
        found[f"{name}_scale_2"] = whole
        found[name.replace("weight", "input_scale")] = torch.tensor(seed + 0.5)
    return found


def stored(given):
    found = dict(given)
    for name, tensor in given.items():
        if name.endswith("weight"):
            found[name], found[f"{name}_scale"] = nvfp4.quantized(tensor, given[f"{name}_scale_2"])
    return found


def test_a_weight_is_not_quantized_before_its_scale_has_arrived():
    model, given = started(stored(sent(1))), sent(2)
    program = trace(model, specs_of(given))
    landing = Landing(program).converting(torch.device("cpu"), 0)
    last = "mlp.gate_up.weight_scale_2"
    landing.place([set(program.arrivals) - {last}, {last}], ())
    for turn in range(2):
        for copy in program.copies:
            if (copy.target == last) == bool(turn):
                part = given[copy.source][copy.region.slices()]
                copy.destination(landing.program.targets[copy.target]).copy_(part)
        landing.arrived(turn)
    assert contents(model) == contents(started(stored(given)))


class CompressedTensorsW4A4Fp4(ModelOptFp4LinearMethod):
    quant_config = None


class ModelOptNvFp4OnlineFusedMoEMethod(CompressedTensorsW4A4Fp4):
    pass


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        (
            ModelOptFp4LinearMethod,
            r"Send mlp\.gate\.weight_scale_2 with it: .* divided by 2688.* mlp\.gate\.input_scale",
        ),
        (CompressedTensorsW4A4Fp4, r"Send it quantized: mlp\.gate\.weight_packed, \.weight_scale"),
        (ModelOptNvFp4OnlineFusedMoEMethod, r"SGLang quantizes it with a kernel .* update_weights_from_tensor"),
    ],
)
def test_weights_without_scales_are_refused_by_name(method, advice):
    given = {name: tensor for name, tensor in sent(1).items() if not name.endswith("_scale_2")}
    match = (
        rf"^mlp\.gate\.weight is bfloat16, and the engine keeps this weight in NVFP4 \({method.__name__}\)\. {advice}"
    )
    with pytest.raises(Unsupported, match=match):
        trace(engine(method), specs_of(given))


def test_columns_that_share_no_scale_are_refused():
    given = sent(1) | {"mlp.gate.weight": torch.zeros(ROWS, 120, dtype=torch.bfloat16)}
    with pytest.raises(Unsupported, match=r"mlp\.gate\.weight has 120 columns, and NVFP4 has a scale for each 16"):
        trace(engine(), specs_of(given))


def test_a_weight_with_several_whole_scales_is_refused():
    def of_both(toy, weights):
        for name, tensor in weights:
            if name.endswith("scale_2"):
                toy.mlp.gate_up.weight_scale_2.data.copy_(tensor)
            else:
                load(toy, [(name, tensor)])

    model = started(stored(sent(1)))
    model.load = of_both
    given = sent(1) | {f"mlp.{shard}.weight_scale_2": torch.ones(2) for shard in ("gate", "up")}
    with pytest.raises(Unsupported, match=r"weight_scale_2 is not one value that the engine keeps with its weight"):
        trace(model, specs_of(given))


@pytest.mark.parametrize("chunk", [1, 100, 1000, 10_000])
def test_chunks_do_not_matter(chunk, monkeypatch):
    monkeypatch.setattr("sglang_reshard.trace.block_fp8._CHUNK", chunk)
    weights, whole = random(3, 13, 64), torch.tensor([0.01, 0.02, 0.001])
    packed, scales = quantize_nvfp4(weights, whole)
    quantizer = _Quantizer(weights.clone(), NVFP4)
    quantizer.whole += [whole[:1], whole[1:]]
    quantizer.run()
    assert torch.equal(quantizer.quantized, packed)
    assert torch.equal(quantizer.scales.view(torch.uint8), scales.view(torch.uint8))
