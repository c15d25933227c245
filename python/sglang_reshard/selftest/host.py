"""The host that a self-test runs on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from sglang_reshard.version import __version__


class Host(msgspec.Struct, frozen=True):
    """gpus: their names, by number. gpu_bytes: memory of the smallest. memory_bytes: that the host can still give."""

    gpus: tuple[str, ...]
    gpu_bytes: int
    memory_bytes: int
    cores: int

    @classmethod
    def here(cls) -> Host:
        import torch

        found = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
        smallest = min((gpu.total_memory for gpu in found), default=0)
        return cls(tuple(g.name for g in found), smallest, available_bytes(), len(os.sched_getaffinity(0)))


def facts() -> dict[str, Any]:
    """Processor, cores, memory, GPUs and versions; no name and no path of the machine."""
    host = Host.here()
    return {
        "cpu": cpu(),
        "cores": host.cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": list(host.gpus),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "sglang", "transformers")},
        "sglang-reshard": __version__,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def cpu() -> str:
    with open("/proc/cpuinfo") as f:
        models = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
    return models[0] if models else platform.machine()


def available_bytes() -> int:
    """Returns the bytes that the system can still give, or the container of this process if that is less."""
    available = int(psutil.virtual_memory().available)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None
