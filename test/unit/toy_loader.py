"""A model of a few tensors whose loader a test writes as one function, and the comparison with running it."""

from types import SimpleNamespace

import torch

from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import FP8
from sglang_reshard.trace.live import live_tensors
from sglang_reshard.trace.tracer import trace
from support.live_memory import fill_with_garbage
from tools.oracle.replay import replay


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Toy(torch.nn.Module):
    """Parameters by name (in bfloat16 unless given as a tensor); `load(model, weights)` is the loader."""

    def __init__(self, load, **parameters):
        super().__init__()
        for name, value in parameters.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.empty(value, dtype=torch.bfloat16)
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        self.load = load

    def load_weights(self, weights):
        self.load(self, weights)


class BlockFp8Linear(torch.nn.Module):
    """Keeps a matrix in float8_e4m3fn, with a scale for each block."""

    def __init__(self, rows, columns, block=(4, 4)):
        super().__init__()
        scales = [-(-n // b) for n, b in zip((rows, columns), block, strict=True)]
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns).to(FP8), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(torch.zeros(scales), requires_grad=False)
        self.quant_method = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=list(block)))


def specs_of(weights):
    return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]


def contents(model):
    return {name: as_bytes(t) for name, t in live_tensors(model)}


def as_bytes(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def check(make, weights, stored=dict.copy):
    """Trace, replay, and compare with what the loader does itself; twice, as updates repeat. The program.

    stored  what a checkpoint has in place of such weights, if the engine converts them
    """
    traced, stock = make(), make()
    fill_with_garbage(traced)
    before, signature = contents(traced), LiveSignature(traced).current()
    program = trace(traced, specs_of(weights))
    assert contents(traced) == before, "the trace wrote to the model"
    assert LiveSignature(traced).current() == signature, "the trace moved something"
    for _ in range(2):
        fill_with_garbage(traced)
        fill_with_garbage(stock)
        replay(program, weights)
        with torch.no_grad():
            stock.load_weights(iter([(n, t.clone()) for n, t in stored(weights).items()]))
        assert contents(traced) == contents(stock)
        assert LiveSignature(traced).current() == signature, "the update moved something"
        weights = {n: t.flip(0) if t.dim() else -t for n, t in weights.items()}
    return program
