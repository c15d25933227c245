"""MXFP8: an engine rank of bf16 weights keeps what SGLang's quantizer, of triton_kernels, makes of them."""

from types import SimpleNamespace

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.block_formats import FP8, quantize_mx
from sglang_reshard.trace.tracer import trace
from toy_loader import Toy, specs_of

mxfp = pytest.importorskip("triton_kernels.numerics_details.mxfp")


def patterns(rows, columns, seed=0):
    """Weights of all sizes, with zeros, the largest and the smallest that there are, and powers of two."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -120, 110, (rows, 1), generator=generator
    )
    weights[0] = 0
    weights[1, :32] = 448 * 2.0 ** torch.arange(-16, 16)
    weights[2, 5] = torch.finfo(torch.bfloat16).max
    weights[3] = torch.finfo(torch.bfloat16).smallest_normal / 4
    return weights.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_it_quantizes_as_triton_kernels_does(dtype):
    weights = patterns(64, 256).to(dtype)
    weights[~weights.isfinite()] = 3.0
    right, scales = mxfp.downcast_to_mxfp_torch(weights, FP8, axis=1)
    ours, of_ours = quantize_mx(weights[None])
    assert torch.equal(ours[0].view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(of_ours[0], scales)
    assert of_ours.dtype == scales.dtype == torch.uint8


class Linear(torch.nn.Module):
    """Rows of a matrix, as SGLang's linear layers keep them in MXFP8."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=FP8), requires_grad=False)
        scales = torch.empty(rows, -(-columns // 32), dtype=torch.uint8)
        self.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
        config = SimpleNamespace(weight_block_size=[1, 32], use_mxfp8=True)
        self.quant_method = SimpleNamespace(quant_config=config)


def model(rows, columns):
    """Loads the second half of the columns of "w", from row 2."""

    def load(toy, weights):
        for name, tensor in weights:
            own = toy.linear.weight if name == "w" else toy.linear.weight_scale_inv
            own.data.copy_(tensor[2:, tensor.shape[1] // 2 :])

    toy = Toy(load)
    toy.linear = Linear(rows - 2, columns // 2)
    return toy


def test_columns_that_share_no_scale_are_refused():
    with pytest.raises(Unsupported, match="w has 200 columns, and MXFP8 has a scale for each 32"):
        trace(model(12, 200), specs_of({"w": torch.zeros(12, 200, dtype=torch.bfloat16)}))
