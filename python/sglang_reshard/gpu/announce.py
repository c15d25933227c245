"""Announces a rank's GPU and its process's settings, see `RankGpuInfo`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

import torch

from sglang_reshard.gpu.nccl_settings import nccl_settings
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.gpu.runtime import CudaRuntime, runtime


def rank_device(device: torch.device | None) -> RankGpuInfo:
    """Returns what a rank on `device` announces; `RankGpuInfo()` for None and for a device that is no GPU."""
    if device is None or not runtime().is_gpu(device):
        return RankGpuInfo()
    return _announced(runtime(), device)


def trainer_device(shards: Iterable[torch.Tensor]) -> torch.device | None:
    """Returns a trainer rank's GPU: that of its shards, else the one that its process uses; None if it uses none.

    A trainer rank whose shards are offloaded still sends from its GPU.
    """
    on_gpu = next((shard.device for shard in shards if runtime().on_gpu(shard)), None)
    if on_gpu is None and runtime().uses_gpu():
        return runtime().current_device()
    return on_gpu


@cache  # NCCL reads its settings once, too
def _announced(gpus: CudaRuntime, device: torch.device) -> RankGpuInfo:
    nccl = {"version": gpus.nccl_version()} | nccl_settings(os.environ)
    return RankGpuInfo(gpus.uuid(device), gpus.visible(), gpus.allocator(), nccl, gpus.fabric(device))
