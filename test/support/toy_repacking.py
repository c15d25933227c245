"""A model whose quantization method repacks what is loaded, as SGLang's do: built, loaded and post-processed."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_reshard.trace.built_modules import remember

COLUMNS = 8


class Method:
    """Quantizes rows to int8 and keeps them transposed. Of `bound` it makes a number, and `steps` anew."""

    def __init__(self):
        self.processed = []

    def process_weights_after_loading(self, layer):
        self.processed.append(layer)
        scale = layer.weight.data.float().abs().amax(1, keepdim=True) / 127
        quantized = (layer.weight.data.float() / scale).round().to(torch.int8)
        layer.weight = torch.nn.Parameter(quantized.t(), requires_grad=False)  # a view of other strides
        layer.scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.steps = torch.nn.Parameter(scale[:3].clone(), requires_grad=False)
        layer.largest = float(layer.bound.max())
        layer.pair = [scale + 1, scale + 2]
        layer.is_packed = True


class Linear(torch.nn.Module):
    def __init__(self, rows, method=Method):
        super().__init__()
        self.quant_method = method()
        self.weight = self.parameter(torch.zeros(rows, COLUMNS, dtype=torch.bfloat16))
        self.bound = self.parameter(torch.zeros(2))
        self.steps = self.parameter(torch.ones(3))
        self.largest, self.is_packed = 0.0, False

    def parameter(self, data):
        made = torch.nn.Parameter(data, requires_grad=False)
        made.weight_loader = self.load
        return made

    def load(self, parameter, tensor):
        assert not self.is_packed, "the loader sees a module that was post-processed"
        parameter.data.copy_(tensor)


class Repacking(torch.nn.Module):
    """An engine rank with its part of the rows of each layer."""

    def __init__(self, layers, rows, rank=0, size=1, method=Method):
        super().__init__()
        self.rank, self.size = rank, size
        self.layers = torch.nn.ModuleList(Linear(rows // size, method) for _ in range(layers))
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        for layer in self.layers:
            remember(layer, process, lambda _: False)

    def load_weights(self, weights):
        named = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "norm":
                named[name].data.copy_(tensor)
                continue
            whole = name.endswith("weight")
            parameter = named[name.replace("left.", "").replace("right.", "")]
            parameter.weight_loader(parameter, tensor.chunk(self.size)[self.rank] if whole else tensor)


def process(layer):
    layer.quant_method.process_weights_after_loading(layer)


def started(model, weights):
    """The model as an engine has it after its start."""
    model.load_weights(weights.items())
    for layer in model.layers:
        process(layer)
    return model


def weights(version, layers, rows):
    generator = torch.Generator().manual_seed(version)
    found = {"norm": torch.full((4,), float(version))}
    for n in range(layers):
        found[f"layers.{n}.weight"] = torch.randn(rows, COLUMNS, generator=generator).bfloat16()
        # Two shards of a fused layer, of which the loader keeps the last.
        found[f"layers.{n}.left.bound"] = torch.rand(2, generator=generator)
        found[f"layers.{n}.right.bound"] = torch.rand(2, generator=generator)
    return found


def live_tensors(model):
    """Path -> tensor or number."""
    found = dict(model.named_parameters())
    for n, layer in enumerate(model.layers):
        found |= {f"layers.{n}.pair.{i}": tensor for i, tensor in enumerate(layer.pair)}
        found[f"layers.{n}.largest"] = torch.tensor(layer.largest)
    return found


BLOCK = (4, 4)


class BlockMethod:
    """Keeps float8_e4m3fn blocks and their scales transposed."""

    quant_config = SimpleNamespace(weight_block_size=BLOCK)

    def process_weights_after_loading(self, layer):
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv.data.t().contiguous(), requires_grad=False)


class BlockLinear(torch.nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.quant_method = BlockMethod()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns).to(torch.float8_e4m3fn), requires_grad=False)
        scales = -(-rows // BLOCK[0]), -(-columns // BLOCK[1])
        self.weight_scale_inv = torch.nn.Parameter(torch.zeros(scales), requires_grad=False)
        remember(self, process, lambda _: False)
