"""Lets a host without a GPU build the layers that SGLang builds on Blackwell GPUs only: NVFP4, and experts in MXFP8.

Functions that ask which GPU there is answer as on one of compute capability 10.0, and tensors stay in host memory.
SGLang's own code builds, loads and post-processes the layers. One kernel has a stand-in: FlashInfer's interleaving of
scales, which moves bytes and computes nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

# Modules of SGLang that ask for the GPU, and what they ask. From 0.5.23 on there is one place to ask, see `_FACTS`.
_PREDICATES = {
    "modelopt_quant": "is_blackwell_supported",
    "compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe": "is_blackwell_supported",
    "fp8": "is_sm100_supported",
}
_FACTS = {"is_blackwell": True, "is_sm100": True}


def pretend() -> None:
    """Must be called after SGLang has been imported, before a model is built. It holds until the process ends."""
    context = import_module("sglang.srt.runtime_context") if find_spec("sglang.srt.runtime_context") else None
    if context is not None and hasattr(context, "override_platform"):
        context.override_platform(**_FACTS).install()
        for module in ("fp8", "fp8_utils"):
            _replace(f"sglang.srt.layers.quantization.{module}", "is_flashinfer_available", _yes)
    else:
        for module, name in _PREDICATES.items():
            _replace(f"sglang.srt.layers.quantization.{module}", name, _yes)
    _replace("sglang.srt.layers.quantization.fp8", "_is_cuda", True)
    _replace("triton_kernels.tensor_details.layout", "cuda_capability_geq", _yes)
    vars(torch.cuda)["get_device_capability"] = lambda *_: (10, 0)
    torch.Tensor.cuda = _same  # type: ignore[method-assign, assignment]
    for flashinfer in ("flashinfer", "flashinfer.quantization.fp4_quantization"):
        for name in ("block_scale_interleave", "nvfp4_block_scale_interleave"):
            _replace(flashinfer, name, interleaved)


def _replace(module: str, name: str, value: object) -> None:
    own = vars(import_module(module))
    assert name in own, f"{module} has no {name}: what SGLang asks has changed"
    own[name] = value


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
