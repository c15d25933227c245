"""Lets a host without a GPU build the layers that SGLang builds on Blackwell GPUs only: NVFP4, and experts in MXFP8.

Functions that ask which GPU there is answer as on one of compute capability 10.0, and tensors stay in host memory.
SGLang's own code builds, loads and post-processes the layers. One kernel has a stand-in: FlashInfer's interleaving of
scales, which moves bytes and computes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

# Modules that ask for the GPU, and what they ask.
_PREDICATES = {
    "sglang.srt.layers.quantization.modelopt_quant": ("is_blackwell_supported",),
    "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe": (
        "is_blackwell_supported",
    ),
    "sglang.srt.layers.quantization.fp8": ("is_sm100_supported",),
    "triton_kernels.tensor_details.layout": ("cuda_capability_geq",),
}


def pretend() -> None:
    """Must be called after SGLang has been imported, before a model is built. It holds until the process ends."""
    for module, names in _PREDICATES.items():
        for name in names:
            assert name in vars(import_module(module)), f"{module} asks for no {name}"
            vars(import_module(module))[name] = _yes
    vars(import_module("sglang.srt.layers.quantization.fp8"))["_is_cuda"] = True
    vars(torch.cuda)["get_device_capability"] = lambda *_: (10, 0)
    torch.Tensor.cuda = _same  # type: ignore[method-assign, assignment]
    for module in ("flashinfer", "flashinfer.quantization.fp4_quantization"):
        vars(import_module(module)).update(block_scale_interleave=interleaved, nvfp4_block_scale_interleave=interleaved)


def interleaved(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales as the tensor cores of Blackwell take them: tiles of 128 rows and 4 columns, 32 rows together."""
    rows, columns = scales.shape[-2:]
    padded = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(-1, padded.shape[-2] // 128, 4, 32, padded.shape[-1] // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1)


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
