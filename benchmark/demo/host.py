"""What the demo ran on, for those who read its figures later."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import psutil

from sglang_reshard.version import __version__


def facts() -> dict[str, str | int]:
    """Processor, cores, memory and versions; no name and no path of the machine."""
    return {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "sglang", "transformers")},
        "sglang-reshard": __version__,
    }


def cpu() -> str:
    with open("/proc/cpuinfo") as f:
        models = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
    return models[0] if models else platform.machine()
