"""NVFP4: two weights in a byte, a float8_e4m3fn scale for 16 columns, and a float32 scale for the whole weight.

The last one depends on all elements of a weight, and an engine rank holds only a part of them. Fused layers have one
together. So the trainer sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from sglang_reshard.layout.regions import TensorSpec

COLUMNS = 16  # that share a scale
WHOLE = "_scale_2"  # the suffix of the scale of a whole weight
_LARGEST = 6.0  # of E2M1
# Between the absolute values of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A value in the middle goes to the even code, so
# every second bound is the next smaller number.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize_nvfp4(weights: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns packed weights, uint8 [n, rows, columns / 2], and their scales, float8_e4m3fn [n, rows, columns / 16].

    weights  [n, rows, columns], floating-point
    whole    float32 [n], the scales of the whole weights

    The arithmetic is that of ModelOpt's NVFP4QTensor, to the bit: a scale is the largest absolute value of 16 columns
    divided by 6 times the weight's own scale, 1 for zeros, and at least 1/512.
    """
    wide = weights.to(torch.float32).unflatten(-1, (-1, COLUMNS))
    whole = whole.view(-1, 1, 1)
    scales = wide.abs().amax(dim=-1) / (whole * _LARGEST)
    scales = scales.masked_fill_(scales == 0, 1.0).clamp_(2**-9, torch.finfo(torch.float8_e4m3fn).max)
    scales = scales.to(torch.float8_e4m3fn)
    scaled = (wide / (scales.to(torch.float32) * whole).unsqueeze(-1)).flatten(-2)
    codes = torch.bucketize(scaled.abs(), _bounds(weights.device), out_int32=True).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return codes[..., 1::2] << 4 | codes[..., 0::2], scales


def _bounds(device: torch.device) -> torch.Tensor:
    bounds = torch.tensor(_BOUNDS, device=device)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros((), device=device))
    return bounds


def nvfp4_layers(model: torch.nn.Module) -> dict[str, str]:
    """Returns the paths of the modules that SGLang keeps in NVFP4, and the classes of their quantization methods."""
    found = {}
    for path, module in model.named_modules():
        for helper in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
            name = type(helper).__name__
            if "fp4" in name.lower() and "mxfp4" not in name.lower():
                found[path] = name
    return found


def refusal(layers: Mapping[str, str], wide: Iterable[TensorSpec]) -> str:
    """Returns why an engine with these `nvfp4_layers` does not take one of the matrices `wide`; empty if it may be for
    another reason.

    wide  those in 16 and 32 bits that were sent without scales and that the loader has not taken
    """
    parents = {f"{path.rpartition('.')[0]}.": method for path, method in layers.items() if "." in path}
    for spec in wide:
        method = next((method for parent, method in parents.items() if spec.name.startswith(parent)), "")
        if method:
            return (
                f"{spec.name} is {spec.dtype}, and the engine keeps this weight in NVFP4 ({method}). "
                f"{_advice(method, spec.name)} Or start the engine on weights in the trainer's format, without "
                "quantization="
            )
    return ""


def _advice(method: str, name: str) -> str:
    module = name.rpartition(".")[0]
    if "Online" in method:
        return (
            "SGLang quantizes it with a kernel while it loads, which an update cannot repeat. Use SGLang's own "
            "update_weights_from_tensor."
        )
    if method.startswith("CompressedTensors"):
        return (
            f"Send it quantized: {module}.weight_packed, .weight_scale, .weight_global_scale and, if the engine's "
            "checkpoint has it, .input_global_scale."
        )
    return (
        f"Send {name}{WHOLE} with it: the largest absolute value of the whole weight divided by 2688, and for layers "
        f"that SGLang fuses that of all of them. Send {module}.input_scale of the engine's checkpoint, too."
    )
