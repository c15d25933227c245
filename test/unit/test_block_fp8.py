"""Weights of 16 and 32 bits for a model in block-fp8: quantized on arrival to what a quantized checkpoint leaves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import FP8, MXFP8, Blocks, quantize_blocks
from sglang_reshard.trace.block_fp8 import _Quantizer
from sglang_reshard.trace.live_shards import live_shards
from sglang_reshard.trace.tracer import trace
from support.sweep import examples
from tools.oracle.replay import replay
from toy_loader import BlockFp8Linear, Toy, check, random, specs_of

BLOCK = (4, 4)


def by_hand(weight, block=BLOCK):
    """One block at a time: float8 weights and scales of a matrix."""
    quantized = torch.empty(weight.shape, dtype=FP8)
    scales = torch.empty([-(-n // b) for n, b in zip(weight.shape, block, strict=True)])
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        part = weight[at].float()
        largest = part.abs().max()
        factor = torch.tensor(448.0) / largest if largest else torch.tensor(1.0)
        quantized[at], scales[i, j] = (part * factor).clamp(-448, 448).to(FP8), 1 / factor
    return quantized, scales


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 13), st.integers(1, 13), st.sampled_from([(4, 4), (3, 5), (16, 1)]), st.integers(0, 99))
def test_blocks_are_quantized_one_by_one(rows, columns, block, seed):
    weights = torch.stack([random(rows, columns, seed=seed + n) for n in range(3)])
    weights[1, : block[0], : block[1]] = 0
    quantized, scales = quantize_blocks(weights, block)
    for n, weight in enumerate(weights):
        right, of_blocks = by_hand(weight, block)
        assert torch.equal(quantized[n].view(torch.uint8), right.view(torch.uint8))
        assert torch.equal(scales[n], of_blocks)


@pytest.mark.parametrize(("blocks", "columns"), [(Blocks(BLOCK), 10), (MXFP8, 64)])
@pytest.mark.parametrize("chunk", [1, 40, 100, 300, 10_000])
def test_chunks_do_not_matter(chunk, blocks, columns, monkeypatch):
    monkeypatch.setattr("sglang_reshard.trace.block_fp8._CHUNK", chunk)
    weights = random(3, 13, columns)
    expected = blocks.quantize(weights)
    quantizer = _Quantizer(weights.clone(), blocks)
    quantizer.run()
    assert torch.equal(quantizer.quantized.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(quantizer.scales, expected[1])


def model(load, rows, columns):
    toy = Toy(load)
    toy.linear = BlockFp8Linear(rows, columns)
    toy.norm = torch.nn.Parameter(torch.empty(8, dtype=torch.bfloat16), requires_grad=False)
    return toy


def rows_of(first, last):
    """Loads some rows of "w", and their scales."""

    def load(toy, weights):
        for name, tensor in weights:
            if name == "norm":
                toy.norm.data.copy_(tensor)
            elif name == "w":
                toy.linear.weight.data.copy_(tensor[first:last])
            else:
                toy.linear.weight_scale_inv.data.copy_(tensor[first // 4 : -(-last // 4)])

    return load


def quantized(weights):
    found = {}
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            found[name], found[f"{name}_scale_inv"] = by_hand(tensor.to(torch.bfloat16))
        else:
            found[name] = tensor
    return found


NORM = random(8, seed=9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("first", "last"), [(0, 12), (4, 8), (8, 11)])
def test_rows_of_a_matrix(dtype, first, last):
    weights = {"w": random(11 if last == 11 else 12, 10, dtype=dtype), "norm": NORM}
    program = check(lambda: model(rows_of(first, last), last - first, 10), weights, quantized)
    (copy,) = [c for c in program.copies if c.source == "w"]
    assert copy.region.count == (last - first, 10), "no block is read that is not needed"


@pytest.mark.parametrize(("first", "last"), [(2, 8), (0, 6), (5, 7)])
def test_a_cut_through_a_block_reads_the_whole_block(first, last):
    """The scale of a block is that of all its elements, others' too."""
    weights = {"w": random(12, 8), "norm": NORM}
    program = check(lambda: model(rows_of(first, last), last - first, 8), weights, quantized)
    (copy,) = [c for c in program.copies if c.source == "w"]
    assert copy.region.start == (first // 4 * 4, 0)
    assert copy.region.count == (-(-last // 4) * 4 - first // 4 * 4, 8)


def test_an_engine_without_blocks_refuses():
    toy = model(rows_of(0, 8), 8, 8)
    del toy.linear.quant_method
    with pytest.raises(Unsupported, match="weight_scale_inv is not written"):
        trace(toy, [TensorSpec("w", (8, 8), "bfloat16"), TensorSpec("norm", (8,), "bfloat16")])


def test_live_weights_in_fp8_are_not_passed_on_as_what_they_were():
    weights = {"w": random(8, 8), "norm": NORM}
    program = trace(model(rows_of(0, 8), 8, 8), specs_of(weights))
    replay(program, weights)
    with pytest.raises(Unsupported, match=r"w cannot be read .* Update engines of this model from the trainer"):
        live_shards(program, {name: tuple(t.shape) for name, t in weights.items()}, 0)


def test_a_wide_weight_with_a_scale_is_refused():
    specs = [TensorSpec("w", (8, 8), "bfloat16"), TensorSpec("w_scale_inv", (2, 2), "float32")]
    with pytest.raises(Unsupported, match="a plain cast is no quantization"):
        trace(model(rows_of(0, 8), 8, 8), [*specs, TensorSpec("norm", (8,), "bfloat16")])


def test_a_weight_that_is_kept_in_two_ways_is_refused():
    def load(toy, weights):
        weights = dict(weights)
        rows_of(0, 8)(toy, weights.items())
        toy.plain.data.copy_(weights["w"])

    toy = model(load, 8, 8)
    toy.plain = torch.nn.Parameter(torch.empty(8, 8, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(Unsupported, match=r"w is .* in plain: the engine keeps it in two ways"):
        trace(toy, [TensorSpec("w", (8, 8), "bfloat16"), TensorSpec("norm", (8,), "bfloat16")])
