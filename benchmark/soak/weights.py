"""Version k of the weights: the same bits for whoever computes them, whole or as shards.

Version 0 is random. Any other has the mantissa of every element changed by one pattern of bits, so no
arithmetic is involved whose rounding could depend on how a tensor is cut. Two versions differ in every
element, none has a NaN, and an element stays within a factor of two of what it was.
"""

from __future__ import annotations

import zlib

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sglang_reshard.selftest import tiny_model

TRAINER_RANKS = ENGINE_TP = 2
MANTISSA = (1 << 23) - 1
# Odd, so that versions up to 2**23 get patterns of their own; large, so that neighbours differ in high bits.
_STRIDE = 0x9E3779B1


def is_verified(version: int, every: int) -> bool:
    """The first version, too: what it takes to look at one for the first time shows before growth is looked for."""
    return version == 1 or version % every == 0


def shapes() -> dict[str, torch.Size]:
    """Of the self-test's model, by checkpoint name."""
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(tiny_model.config(TRAINER_RANKS, ENGINE_TP))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def pattern(version: int) -> int:
    """The bits of the mantissa in which a version differs from version 0."""
    return version * _STRIDE & MANTISSA


def whole(name: str, shape: torch.Size, version: int) -> torch.Tensor:
    """A tensor of a version, unsharded, float32."""
    if len(shape) == 1:
        tensor = torch.ones(shape)  # a norm's
    else:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shape, generator=generator) * 0.05
    _change(tensor, pattern(version))
    return tensor


class Weights:
    """A trainer rank's part: every tensor cut along its first dimension, as FSDP does."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.named: list[tuple[str, DTensor]] = [
            (name, distribute_tensor(whole(name, shape, 0), mesh, [Shard(0)], src_data_rank=None))
            for name, shape in shapes().items()
        ]
        self._version = 0

    def become(self, version: int) -> None:
        """In place, as an optimizer does."""
        for _, tensor in self.named:
            _change(tensor.to_local(), pattern(self._version) ^ pattern(version))
        self._version = version


def _change(tensor: torch.Tensor, bits: int) -> None:
    tensor.view(torch.int32).bitwise_xor_(bits)
